/* The explorer of a transformer's layouts: what one device is given, and what it sends.
   Layouts.read reads what is typed, and the others count as chapter 22 does, all without
   a page. A case holds the sizes of model and batch, and the setting of the mesh. */
"use strict";
(() => {
  const { product, productOf, sum, english, percent, bytes: short, check, bar, row, keyed } = Form;
  const AXES = ["pipe", "data", "seq", "tensor"];
  const LABELS = {
    layers: "Layers", width: "Width", hidden: "Hidden size", heads: "Heads",
    vocabulary: "Vocabulary", sequences: "Sequences", tokens: "Sequence length",
    bytes: "Bytes per number", pipe: "pipe", data: "data", seq: "seq", tensor: "tensor",
    microbatches: "Microbatches",
  };
  const LARGEST = 1e7;
  const MOST_DEVICES = 65536;
  const WORD = 4; // bytes of a token's number, and of the loss

  const divisors = (n) => [...Array(n + 1).keys()].filter((d) => n % d === 0);

  /* What has to divide what, and why. */
  const rules = (at) => [
    ["layers", ["pipe"], "Every stage has equally many layers."],
    ["width", ["heads"], "All heads are equally wide."],
    ["heads", ["tensor"], "Every device has equally many heads."],
    ["hidden", ["tensor"], "Every device has equally many hidden features."],
    ["vocabulary", ["tensor"], "Every device has equally many rows of the table."],
    ["tokens", ["seq"], "Every device has an equal part of each sequence."],
    ["sequences", ["data", "microbatches"], "Every microbatch has equally many sequences."],
    ...(at.cut ? [["width", ["data"], "Weights that are cut along data are cut there."]] : []),
  ];
  const devicesOf = (at) => productOf(at, AXES);

  /* A case from an object of texts, and the room in bytes. What cannot be read or counted,
     or does not divide, throws an Error, whose `field` names the culprit. */
  function read(texts) {
    const at = { cut: texts.cut === "yes", ...Form.wholeNumbers(texts, LABELS, LARGEST) };
    const room = texts.room.trim();
    check(room === "" || (/^\d*\.?\d+$/.test(room) && room > 0), "room",
      `Room: cannot read "${room}" as gigabytes. Write a number above 0, such as 80 or 0.5,`,
      "or nothing at all.");

    const longest = AXES.reduce((a, b) => (at[b] > at[a] ? b : a));
    check(devicesOf(at) <= MOST_DEVICES, longest, `The mesh has ${english(devicesOf(at))} devices.`,
      `This page stops at ${english(MOST_DEVICES)}: take a smaller number for ${longest}.`);
    Form.checkRules(at, rules(at), LABELS, LARGEST);
    check(Number.isSafeInteger(whole(at) * 4), "width",
      "The model has more bytes than this page can count. Take a smaller width.");
    check(Number.isSafeInteger(Math.ceil(sent(at))), "sequences",
      "A device would send more bytes than this page can count. Take fewer sequences.");
    return [at, room === "" ? Infinity : room * 1e9];
  }

  /* Every leaf of the parameters with its shape, its spec, and one device's block of it. */
  function given(at) {
    const { layers, width, hidden, vocabulary, bytes } = at;
    const cut = at.cut ? "data" : null;
    const leaf = (name, shape, ...spec) => {
      const block = shape.map((size, d) => size / (at[spec[d]] ?? 1));
      return { name, shape, spec, block, bytes: bytes * product(block) };
    };
    return [
      leaf("table", [vocabulary, width], "tensor", cut),
      leaf("norm1", [layers, width], "pipe"),
      leaf("wqkv", [layers, width, 3, width], "pipe", cut, null, "tensor"),
      leaf("wo", [layers, width, width], "pipe", "tensor", cut),
      leaf("norm2", [layers, width], "pipe"),
      leaf("w1", [layers, width, hidden], "pipe", cut, "tensor"),
      leaf("w2", [layers, hidden, width], "pipe", "tensor", cut),
      leaf("norm", [width]),
    ];
  }

  const parameters = (at) => sum(given(at).map((leaf) => leaf.bytes));
  const whole = (at) => parameters({ ...at, pipe: 1, data: 1, seq: 1, tensor: 1 });
  const allReduce = (size, devices) => 2 * (devices - 1) * size / devices;

  /* Ticks, runs of a layer, and what a device has of the batch: its tokens, the bytes of
     their activation, and of one microbatch's. */
  function work(at) {
    const ticks = at.microbatches + at.pipe - 1;
    const tokens = at.sequences * at.tokens / (at.data * at.seq);
    const activation = at.bytes * tokens * at.width;
    const micro = activation / at.microbatches;
    return { ticks, runs: ticks * at.layers / at.pipe, tokens, activation, micro };
  }

  /* Bytes that a device sends for one gradient, by what they are for. */
  function bill(at) {
    const { width, pipe, data, seq, tensor } = at;
    const { ticks, runs, activation, micro } = work(at);
    const again = at.cut ? 1 : 0; // a checkpointed layer repeats what the way back needs
    let [gradients, gathers] = [0, 0];
    for (const { shape, spec, bytes } of given(at)) {
      const copies = AXES.slice(0, 3).filter((axis) => !spec.includes(axis));
      gradients += allReduce(bytes, productOf(at, copies));
      if (spec.includes("data")) {
        gathers += (shape.length > 2 ? 1 + 2 * ticks : 2) * (data - 1) * bytes;
      }
    }
    return {
      gradients,
      gathers,
      "sums of tensor": runs * (4 + again) * allReduce(micro, tensor)
        + allReduce(2 * activation + 3 * activation / width, tensor),
      ring: runs * (seq - 1) * (2 + again) * 2 * micro / tensor,
      relay: pipe > 1 ? 2 * ticks * micro : 0,
      loss: allReduce(WORD, pipe) + allReduce(WORD, data * seq),
    };
  }
  const sent = (at) => sum(Object.values(bill(at)));

  /* Every setting of as many devices that the sizes allow. A pipeline gets as many
     microbatches as its sequences allow, but at most 16, or four for each stage. */
  function settings(at) {
    const found = [];
    const devices = devicesOf(at);
    const factors = divisors(devices);
    const fits = (n) => factors.filter((d) => n % d === 0);
    for (const pipe of fits(devices)) {
      for (const data of fits(devices / pipe)) {
        for (const seq of fits(devices / (pipe * data))) {
          const tensor = devices / (pipe * data * seq);
          const rows = at.sequences / data;
          let microbatches = pipe === 1 ? 1 : Math.min(Math.floor(rows), Math.max(16, 4 * pipe));
          while (rows % microbatches > 0) microbatches -= 1; // 0 if data does not divide
          for (const cut of data > 1 ? [false, true] : [false]) {
            const setting = { ...at, pipe, data, seq, tensor, cut, microbatches };
            if (!Form.broken(setting, rules(setting))) found.push(setting);
          }
        }
      }
    }
    return found;
  }

  /* All settings, this one as it is, whose state has room, the cheapest first. */
  function ranking(at, room) {
    const same = (other) => [...AXES, "cut"].every((name) => other[name] === at[name]);
    return [...settings(at).filter((other) => !same(other)), at]
      .map((setting) => ({ setting, sent: sent(setting), state: 4 * parameters(setting) }))
      .filter(({ state }) => state <= room)
      .sort((a, b) => a.sent - b.sent || a.state - b.state);
  }

  globalThis.Layouts = { read, given, work, bill, settings, ranking };
  const root = document.querySelector("#explorer");
  if (!root) return;

  /* Words. Those that become HTML hold numbers and names that stand above. */
  const plural = (n, word) => `${english(n)} ${word}${Math.round(n) === 1 ? "" : "s"}`;
  const tuple = (items) => `(${items.join(", ")}${items.length === 1 ? "," : ""})`;
  const written = (spec) => `P(${spec.map((axis) => (axis ? `"${axis}"` : "None")).join(", ")})`;

  /* Bytes in full, with the short form behind them. */
  const full = (n) => plural(n, "byte") + (n < 1000 ? "" : ` (${short(n)})`);

  function named(setting) {
    const sizes = AXES.filter((axis) => setting[axis] > 1);
    const parts = sizes.map((axis) => `${axis} ${setting[axis]}`);
    if (setting.cut) parts.push("cut");
    if (setting.microbatches > 1) parts.push(`${english(setting.microbatches)} microbatches`);
    return parts.join(", ") || "one device";
  }

  function answer(at, ranked, place, room) {
    const n = devicesOf(at);
    const who = n === 1 ? "The one device is" : `Each of ${english(n)} devices is`;
    const least = ranked.length ? full(ranked[0].sent) : "";
    const among = `Of ${plural(ranked.length, "setting")} of ${plural(n, "device")}`
      + (room < Infinity ? " whose state fits," : ",");
    const rank = place === 0 ? `${among} none sends less.`
      : place > 0 ? `${among} it is number ${place + 1}; the cheapest sends ${least}.`
        : `Its state does not fit. ${least ? `The cheapest that fits sends ${least}.`
          : "No setting of these devices does."}`;
    return `${who} given ${full(parameters(at))} of parameters and sends ${full(sent(at))}`
      + ` for one gradient. ${rank}`;
  }

  function time(at) {
    const { ticks, runs, micro } = work(at);
    const bubble = at.pipe - 1;
    return `The activation of one microbatch weighs ${full(micro)} on a device. A gradient takes`
      + ` ${plural(ticks, "tick")} forward, in which a device runs ${plural(runs, "layer")}. `
      + (bubble ? `In ${english(bubble)} of the ticks no microbatch is there for it: the bubble is`
        + ` ${percent(bubble, ticks)}.` : "There is no pipeline and so no bubble.");
  }

  /* The page. Its state is its fields, which the address repeats. */
  const STATE = [...Object.keys(LABELS), "cut", "room"];
  const { part, take, start } =
    Form.connect(root, STATE, ["bytes", "cut"], (texts) => show(...read(texts)));
  let rows = []; // the settings that the ranking shows

  function show(at, room) {
    const ranked = ranking(at, room);
    const place = ranked.findIndex(({ setting }) => setting === at);
    part("answer").textContent = answer(at, ranked, place, room);
    part("time").textContent = time(at);

    const own = parameters(at);
    const state = [["Parameters", own, 0], ["Gradient", own, 2], ["Two moments", 2 * own, 1]];
    part("given-bar").innerHTML = bar(state, 4 * whole(at), "Of the state of a whole model");
    part("leaves").innerHTML = given(at).map(({ name, spec, shape, block, bytes }) =>
      row(name, written(spec), tuple(shape), tuple(block), english(bytes))).join("");
    part("state").innerHTML = [
      ...state.map((entry, i) => row(keyed(entry, i), english(entry[1]))),
      row("State, the sum", english(4 * own)),
      row("Its part of the batch", english(2 * WORD * work(at).tokens)),
    ].join("");

    const [sentBar, kinds] = Form.shares(bill(at), 2, "Of what a device sends");
    part("sent-bar").innerHTML = sentBar;
    part("kinds").innerHTML = kinds;

    rows = ranked.map((entry, i) => [i, entry]).filter(([i]) => i < 5 || i === place);
    part("ranking").innerHTML = rows.map(([i, { setting, sent, state }], n) => `
      <tr data-row="${n}" ${i === place ? 'aria-current="true"' : ""}>
        <td>${i + 1}</td>
        <th scope="row"><button type="button">${named(setting)}</button></th>
        <td>${short(sent)}</td><td>${short(state)}</td>
        <td>${percent(setting.pipe - 1, work(setting).ticks)}</td></tr>`).join("");
  }

  part("ranking").addEventListener("click", ({ target }) => {
    const clicked = target.closest("tr");
    const { setting } = rows[clicked.dataset.row][1];
    const values = [...AXES, "microbatches"].map((name) => [name, setting[name]]);
    take({ ...Object.fromEntries(values), cut: setting.cut ? "yes" : "no" });
    part("ranking").querySelector("[aria-current] button").focus({ preventScroll: true });
  });
  start();
})();
