/* The calculator of a step that trains all weights, or adapters beside frozen ones, or that
   generates: what one device holds and sends, and what binds. Calculator.read and
   Calculator.generate.read read what is typed, and the others count as chapter 26 does, all
   without a page. A case holds the sizes of the model, the batch, the chip and the layout. */
"use strict";
(() => {
  const { productOf, sum, english, three, percent, bytes, check, bar, row, keyed } = Form;
  const AXES = ["data", "fsdp", "model"];
  const BOTH = {
    layers: "Layers", width: "Width", hidden: "MLP width", heads: "Heads",
    kv_heads: "Key heads", head_size: "Head size", vocabulary: "Vocabulary",
    axes: "Axes of links", node: "Devices of a node", network: "Network, GB/s",
  };
  const TRAIN = { ...BOTH, tokens: "Tokens", sequence: "Sequence length", devices: "Devices",
    data: "data", fsdp: "fsdp", model: "model" };
  const ADAPTERS = { ...TRAIN, rank: "Rank" };
  const GENERATE = { ...BOTH, rows: "Rows", positions: "Positions", prompt: "Prompt tokens",
    used: "Prefill, % of peak", replicas: "Replicas", ways: "Ways" };
  const LARGEST = 1e9;
  const BF16 = 2; // bytes of a number that is sent, or kept for the way back
  const F32 = 4; // bytes of a logit
  const GIB = 2 ** 30;
  const TIGHT = 0.9; // of a device's memory; above it scratch space may not fit
  const HOP = 1e-6; // seconds that the shortest message takes from a device to the next

  /* Dense bf16 FLOP/s, bytes of memory, bytes/s of memory, bytes/s that a device sends along
     one axis of links, and how many such axes it has: the chapter's table, and three more
     whose sources the page names. Only GPUs have nodes: links join a slice of TPUs. */
  const CHIPS = {
    "TPU v5e": [197e12, 16e9, 819e9, 100e9, 2],
    "TPU v5p": [459e12, 95 * GIB, 2765e9, 200e9, 3],
    "TPU v6e": [918e12, 32 * GIB, 1638e9, 200e9, 2],
    "TPU7x": [2307e12 / 2, 96 * GIB, 7380e9 / 2, 200e9, 3], // a device is half a chip
    "H100": [989e12, 80e9, 3350e9, 450e9, 1],
    "A100": [312e12, 80e9, 2039e9, 300e9, 1],
    "H200": [989e12, 141e9, 4800e9, 450e9, 1],
    "B200": [2250e12, 179e9, 8000e9, 900e9, 1],
  };
  /* Bytes for each weight: itself, its gradient, and the rest of the training state. */
  const RECIPES = { "Adam f32": [2, 2, 12], "Adam bf16": [2, 2, 4], "SGD": [2, 2, 0] };
  /* Bytes of a layer's projections in a frozen base, with the scales of their outputs, or, as
     QLoRA has them at first, of each 64 weights. */
  const BASES = {
    "bfloat16": (at) => BF16 * inLayer(at),
    "int8": (at) => inLayer(at) + F32 * outputs(at),
    "int4": (at) => (1 / 2 + F32 / 64) * inLayer(at),
  };

  const total = (parts) => sum(Object.values(parts));

  /* What has to divide what, and why. */
  const SPLITS = [
    ["heads", ["kv_heads"], "Every head of keys and values serves equally many queries."],
    ["heads", ["model"], "Every device has equally many heads."],
    ["hidden", ["model"], "Every device has equally many hidden features."],
    ["vocabulary", ["model"], "Every device has equally many rows of the table."],
  ];
  const RULES = [
    ...SPLITS,
    ["width", ["fsdp"], "Weights that are sharded are cut there."],
    ["tokens", ["sequence", "data", "fsdp"], "Every replica and shard has equally many sequences."],
  ];

  /* A case from an object of texts. What cannot be read or counted, or does not divide,
     throws an Error, whose `field` names the culprit. */
  function readBoth(texts, labels) {
    const [flops, memory, memorySpeed, axisSpeed, axes] = CHIPS[texts.chip];
    const at = {
      chip: { flops, memory, memorySpeed, axisSpeed, axes, hasNodes: !texts.chip.startsWith("TPU") },
      matrices: texts.gated === "yes" ? 3 : 2,
      ...Form.wholeNumbers(texts, labels, LARGEST),
    };
    check(at.axes <= axes, "axes", `Axes of links is ${english(at.axes)}, and ${texts.chip}`,
      `has ${axes}. Write ${axes === 1 ? "1" : `1 to ${axes}`}.`);
    return at;
  }

  function read(texts) {
    const isWhole = texts.for !== "adapters";
    const at = {
      rank: 0, // of adapters, if these alone are trained
      base: BASES[isWhole ? "bfloat16" : texts.base],
      recipe: RECIPES[texts.recipe],
      again: texts.recompute === "every layer",
      gathers: texts.gathers === "twice" ? 2 : 1,
      ...readBoth(texts, isWhole ? TRAIN : ADAPTERS),
    };
    const ways = productOf(at, AXES);
    check(ways === at.devices, "devices", `Devices is ${english(at.devices)}, and`,
      `${AXES.join(" × ")} = ${english(ways)}.`,
      ways <= LARGEST ? `Write ${english(ways)}, or change` : "Change", "data, fsdp or model.");
    Form.checkRules(at, RULES, TRAIN, LARGEST, (name) => TRAIN[name], english);
    check(Number.isSafeInteger(sum(at.recipe) * weights(at)), "width",
      "The model has more bytes than this page can count. Take a smaller width.");
    check(Number.isSafeInteger(Math.ceil(sum(at.recipe) * adapters(at))), "rank",
      "The adapters have more bytes than this page can count. Take a lower rank.");
    check(Number.isSafeInteger(Math.ceil(total(held(at)) + total(sent(at)))), "tokens",
      "A device has more bytes to hold and send than this page can count. Take fewer tokens.");
    return at;
  }

  /* The model: its weights, those that every token is multiplied with, and FLOPs of a step
     on all devices together. */
  const inLayer = ({ width, hidden, heads, kv_heads, head_size, matrices }) =>
    2 * width * head_size * (heads + kv_heads) + matrices * width * hidden;
  const weights = (at) => at.layers * inLayer(at) + 2 * at.vocabulary * at.width;
  const outputs = ({ width, hidden, heads, kv_heads, head_size, matrices }) =>
    head_size * (heads + 2 * kv_heads) + 2 * width + (matrices - 1) * hidden;
  /* The sides of a layer's projections that `model` cuts; the others are as wide as the model. */
  const cutSides = ({ hidden, heads, kv_heads, head_size, matrices }) =>
    2 * head_size * (heads + kv_heads) + matrices * hidden;
  const storedBytes = (at) => at.layers * at.base(at) + 2 * BF16 * at.vocabulary * at.width;
  /* Numbers of the adapters that a device holds: they are cut by `model` alone. */
  const adapters = (at) => at.rank * at.layers
    * ((4 + at.matrices) * at.width + cutSides(at) / at.model);
  const multiplied = (at) => at.layers * inLayer(at) + at.vocabulary * at.width;
  /* A frozen weight has no gradient, and all ways of `model` multiply what they do not cut. */
  const stepFlops = (at) => ((at.rank ? 4 : 6) * multiplied(at) + 6 * at.model * adapters(at))
    * at.tokens;
  const attentionFlops = ({ layers, tokens, sequence, heads, head_size }) =>
    12 * layers * tokens * sequence * heads * head_size;
  /* What is computed a second time if layers keep their inputs alone: the way forward, but
     for the last product of each layer, and attention's third of it. */
  const againFlops = (at) => (at.again ? attentionFlops(at) / 3
    + 2 * at.layers * (inLayer(at) - at.width * at.hidden) * at.tokens
    + 2 * at.model * (adapters(at) - at.layers * at.rank * at.width) * at.tokens : 0);
  const allFlops = (at) => stepFlops(at) + attentionFlops(at) + againFlops(at);

  const gather = (bytes, n) => (n - 1) / n * bytes; // on a ring; a scatter sends as many

  /* Bytes that one device sends in a step, by axis of the mesh. */
  function sent(at) {
    const { layers, tokens, width, rank, matrices, again, data, fsdp, model } = at;
    const gradients = BF16 * (rank ? adapters(at) : weights(at) / model);
    // two blocks, there and back, and the first once more if it is computed again; of each
    // adapter what it has between its two matrices, there for two and back for the others
    const summed = (again ? 5 : 4) * width + ((again ? 6 : 4) + matrices) * rank;
    return {
      data: 2 * gather(gradients / fsdp, data),
      fsdp: sentForBase(at) + (rank ? 2 : 1) * gather(gradients, fsdp), // adapters are whole
      model: 2 * layers * gather(BF16 * summed * tokens / (data * fsdp), model),
    };
  }
  const sentForBase = (at) => at.gathers * gather(storedBytes(at) / at.model, at.fsdp);

  /* Bytes that one device holds, by what they are. */
  function held(at) {
    const { layers, width, tokens, gathers, rank, data, fsdp, model } = at;
    const frozen = rank ? storedBytes(at) / (fsdp * model) : 0;
    const trained = rank ? adapters(at) : weights(at) / (fsdp * model);
    const [weight, gradient, state] = at.recipe.map((size) => size * trained);
    const gathered = gathers === 1 ? gather(storedBytes(at) / model, fsdp) : 0;
    const here = BF16 * tokens / (data * fsdp);
    // what the products of a layer need on the way back
    const whole = here * (4 * width + cutSides(at) / model + (4 + at.matrices) * rank);
    const kept = layers * (at.again ? here * width : whole);
    const layer = (gathers === 2 ? gather(at.base(at) / model, fsdp) : 0)
      + (at.again ? whole : 0);
    const logits = 2 * F32 * tokens / (data * fsdp) * at.vocabulary / model;
    return { frozen, weight, gradient, state, gathered, kept, layer, logits };
  }

  /* Bytes/s of the rings along an axis of the mesh: those of the links, or, where a ring
     leaves the node, of the network cards that its members in one node have. Devices are
     counted off along the last axis first. */
  function speed(at, axis) {
    const links = at.axes * at.chip.axisSpeed;
    const inner = productOf(at, AXES.slice(AXES.indexOf(axis) + 1));
    const isInside = at.devices <= at.node || at.node % (inner * at[axis]) === 0;
    if (!at.chip.hasNodes || at[axis] === 1 || isInside) return links;
    return Math.min(links, Math.max(1, Math.floor(at.node / inner)) * at.network * 1e9);
  }
  const leaving = (at) => AXES.filter((axis) => speed(at, axis) < at.axes * at.chip.axisSpeed);

  /* Seconds of one step, each alone. What is held is read once and written once, unless it is
     frozen. */
  function times(at) {
    const { flops, memorySpeed } = at.chip;
    return {
      arithmetic: allFlops(at) / at.devices / flops,
      wires: sum(Object.entries(sent(at)).map(([axis, size]) => size / speed(at, axis))),
      memory: (2 * total(held(at)) - held(at).frozen) / memorySpeed,
    };
  }
  const leastSeconds = (at, count = times) => Math.max(...Object.values(count(at)));
  /* One after the other, and all that is sent along one axis of links. */
  function mostSeconds(at, count = times) {
    const { arithmetic, wires, memory } = count({ ...at, axes: 1 });
    return Math.max(arithmetic, memory) + wires;
  }
  const binds = (alone) => Object.keys(alone).reduce((a, b) => (alone[b] > alone[a] ? b : a));

  /* The three inequalities: what the case has, and what arithmetic needs to bind. */
  function limits(at) {
    const intensity = (axis) => at.chip.flops / speed(at, axis); // FLOPs for a byte sent
    return {
      data: { has: at.tokens / at.data, above: intensity("data") },
      fsdp: { has: at.tokens / (at.data * at.fsdp), above: intensity("fsdp") },
      model: { has: at.model, below: at.hidden / intensity("model") },
    };
  }

  /* Generating. A case has `data` replicas of `model` ways, of which `keyWays` cut the key
     heads, and `group` share each; `rows` are those of one replica. A layout of the cache says
     into how many parts the cache is cut, what else has to divide, and what a layer sends for
     it: [passes round a ring, bytes, devices], an all-reduce being two passes. */
  const CACHES = {
    "by key heads": { cut: (at) => at.keyWays, rules: [], sends: () => [] },
    "by key heads and positions": {
      cut: (at) => at.model,
      rules: [["positions", ["group"], "Each of them has equally many positions."]],
      sends: (at) => [[2, queries(at) / at.keyWays, at.group], // gathered; mixed and scattered
        [3, F32 * at.rows * at.heads / at.keyWays, at.group]], // softmax: top, scattered sums
    },
    "by key heads and rows": {
      cut: (at) => at.model,
      rules: [["rows", ["data", "group"], "Each of them has equally many rows of the cache."]],
      sends: (at) => [[2, queries(at) / at.model, at.group]], // to their rows, and back
    },
    "whole": { cut: () => 1, rules: [], sends: (at) => [[2, keys(at), at.keyWays]] },
  };
  const queries = (at) => BF16 * at.rows * at.heads * at.head_size;
  const keys = (at) => BF16 * at.rows * at.kv_heads * at.head_size;

  function readGenerate(texts) {
    const at = { ...readBoth(texts, GENERATE), layout: CACHES[texts.cache], fsdp: 1,
      weightBytes: Number(texts.weight_bytes), cacheBytes: Number(texts.cache_bytes) };
    [at.data, at.model, at.devices] = [at.replicas, at.ways, at.replicas * at.ways];
    at.keyWays = Form.divisor(at.kv_heads, at.model);
    at.group = at.model / at.keyWays;
    check(at.devices <= LARGEST, "ways", "Replicas × Ways is larger than this page counts.",
      `Write at most ${english(Math.floor(LARGEST / at.data))} ways.`);
    check(at.prompt <= at.positions, "prompt", `Prompt tokens is ${english(at.prompt)}, and`,
      `Positions is ${english(at.positions)}. Write at most that, or more positions.`);
    check(at.used <= 100, "used", "Prefill, % of peak is over 100. Write at most 100.");
    const words = { ...GENERATE, data: "Replicas", model: "Ways", group: "ways to a key head" };
    Form.checkRules(at, [...SPLITS, ["rows", ["data"], "Every replica has equally many rows."],
      ...at.layout.rules], GENERATE, LARGEST, (name) => words[name], english);
    at.rows /= at.data;
    check(Number.isSafeInteger(Math.ceil(4 * weights(at) + rowBytes(at))), "width",
      "The model has more bytes than this page can count. Take a smaller width.");
    check(Number.isSafeInteger(Math.ceil(total(heldToGenerate(at)))), "rows",
      "A device has more bytes to hold than this page can count. Take fewer rows.");
    return at;
  }

  /* Weights of keys and values that a device has because others of its group have them, times
     the ways; bytes of the weights that a step reads, and of a row's cache, whole. */
  const repeated = ({ layers, width, head_size, kv_heads, group }) =>
    (group - 1) * 2 * layers * width * head_size * kv_heads;
  const readBytes = (at) => at.weightBytes * (multiplied(at) + repeated(at)) / at.model;
  const rowBytes = ({ layers, kv_heads, head_size, positions, cacheBytes }) =>
    cacheBytes * 2 * layers * kv_heads * head_size * positions;
  /* A device that holds the whole cache looks at the key heads of its own queries alone. */
  const lookedAt = (at) => at.rows * rowBytes(at) / Math.max(at.layout.cut(at), at.keyWays);

  function heldToGenerate(at) {
    return {
      weight: at.weightBytes * (weights(at) + repeated(at)) / at.model,
      cache: at.rows * rowBytes(at) / at.layout.cut(at),
      logits: F32 * at.rows * at.vocabulary / at.model,
    };
  }
  /* The most rows of all replicas that leave a tenth of the memory free, and are accepted. */
  function mostRows(at) {
    const { weight, cache, logits } = heldToGenerate({ ...at, rows: 1 });
    const step = at.layout === CACHES["by key heads and rows"] ? at.group : 1; // rows of a replica
    const most = Math.min((TIGHT * at.chip.memory - weight) / (cache + logits), LARGEST / at.data);
    return Math.max(0, Math.floor(most / step)) * step * at.data;
  }
  /* The rows of a replica beyond which arithmetic takes longer than the memory. */
  function criticalRows(at) {
    const { flops, memorySpeed } = at.chip;
    const one = { ...at, rows: 1 };
    const gain = decodeFlops(one) / at.model / flops - lookedAt(one) / memorySpeed;
    return gain > 0 ? readBytes(at) / memorySpeed / gain : Infinity;
  }

  const scores = (at, tokens, sequence) => attentionFlops({ ...at, tokens, sequence }) / 3;
  const decodeFlops = (at) => 2 * (multiplied(at) + repeated(at)) * at.rows
    + scores(at, at.rows, at.positions);
  const prefillFlops = (at) => scores(at, at.prompt, at.prompt) // the head: for the last alone
    + 2 * ((at.layers * inLayer(at) + repeated(at)) * at.prompt + at.vocabulary * at.width);

  /* The sums of the blocks and of the embedding, and what the layout of the cache sends. */
  const sums = (at, tokens) =>
    [[2 * (2 * at.layers + 1), BF16 * tokens * at.width, at.model]];
  const forCache = (at) => at.layout.sends(at).map(([n, ...rest]) => [n * at.layers, ...rest]);
  const ringBytes = (rings) => sum(rings.map(([passes, size, n]) => passes * gather(size, n)));
  const ringSeconds = (at, rings) => ringBytes(rings) / speed(at, "model")
    + HOP * sum(rings.map(([passes, , n]) => passes * (n - 1)));
  const sentToGenerate = (at) =>
    ({ sums: ringBytes(sums(at, at.rows)), cache: ringBytes(forCache(at)) });
  const sentSeconds = (at) => total(sentToGenerate(at)) / speed(at, "model");

  /* Seconds of a step that adds a token to each row, and of one prompt's way to its first. */
  const decodeTimes = (at) => ({
    arithmetic: decodeFlops(at) / at.model / at.chip.flops,
    wires: ringSeconds(at, [...sums(at, at.rows), ...forCache(at)]),
    memory: (readBytes(at) + lookedAt(at)) / at.chip.memorySpeed,
  });
  const prefillTimes = (at) => ({
    arithmetic: prefillFlops(at) / at.model / (at.chip.flops * at.used / 100),
    wires: ringSeconds(at, sums(at, at.prompt)),
    memory: readBytes(at) / at.chip.memorySpeed,
  });

  globalThis.Calculator = { CHIPS, RECIPES, read, weights, multiplied, stepFlops, attentionFlops,
    againFlops, sent, held, speed, times, leastSeconds, mostSeconds, binds, limits,
    generate: { CACHES, read: readGenerate, held: heldToGenerate, sent: sentToGenerate, rowBytes,
      mostRows, criticalRows, decodeTimes, prefillTimes } };
  const root = document.querySelector("#explorer");
  if (!root) return;

  /* Words. Those that become HTML hold numbers and names that stand above. */
  const seconds = (n) => (n >= 1 || n === 0 ? `${three(n)} s`
    : n >= 1e-3 ? `${three(1e3 * n)} ms` : `${three(1e6 * n)} µs`);
  const devicesHold = (at, holds, has = at.chip.memory) =>
    `${at.devices === 1 ? "The one device" : `Each of ${english(at.devices)} devices`} `
    + (holds <= TIGHT * has ? `holds ${bytes(holds)} of its ${bytes(has)}.`
      : holds <= has ? `holds ${bytes(holds)} of its ${bytes(has)}: less than a tenth is left,`
        + " and the compiler's scratch space may not fit."
      : `would hold ${bytes(holds)}, and has ${bytes(has)}: this does not fit.`);
  const inAStep = (sends, least, most, binding, mostly = "") =>
    ` It sends ${bytes(sends)} in a step, which takes ${seconds(least)} at best, where ${binding}`
    + ` ${binding === "wires" ? "bind" : "binds"}${mostly}, and ${seconds(most)} at worst:`;
  const leavesNode = (at, names) => (names.length
    ? ` What ${names.join(" and ")} ${names.length > 1 ? "send" : "sends"} leaves`
      + ` the node of ${english(at.node)} and waits for the network.` : "");

  function answer(at) {
    const { arithmetic } = times(at);
    const [least, most] = [leastSeconds(at), mostSeconds(at)];
    return devicesHold(at, total(held(at)))
      + inAStep(total(sent(at)), least, most, binds(times(at)))
      + ` ${three(at.tokens / least)} to ${three(at.tokens / most)} tokens a second, with the`
      + ` arithmetic at ${percent(arithmetic, least)} to ${percent(arithmetic, most)} of its peak.`
      + leavesNode(at, leaving(at))
      + (at.rank ? toTrainAll({ ...at, rank: 0, base: BASES.bfloat16 }) : "");
  }
  const toTrainAll = (at) => " To train all weights"
    + ` a device would hold ${bytes(total(held(at)))} and send ${bytes(total(sent(at)))}, and a step`
    + ` would take ${seconds(leastSeconds(at))} at best.`;

  function answerGenerate(at, [least, most], [first, late]) {
    const [rows, binding] = [mostRows(at), binds(decodeTimes(at))];
    const mostly = { arithmetic: "", wires: sentSeconds(at) > 0.5 * decodeTimes(at).wires
      ? ", mostly by their bytes" : ", mostly by their latency",
    memory: lookedAt(at) > readBytes(at) ? ", mostly for the cache" : ", mostly for the weights",
    }[binding];
    return devicesHold(at, total(heldToGenerate(at)))
      + (rows ? ` With a tenth left, at most ${english(rows)} ${rows > 1 ? "rows fit" : "row fits"}.`
        : " With a tenth left, no row fits.")
      + inAStep(total(sentToGenerate(at)), least, most, binding, mostly)
      + ` ${three(1 / least)} to ${three(1 / most)} tokens a second for each row, and`
      + ` ${three(at.rows * at.data / least)} to ${three(at.rows * at.data / most)} in all. A prompt`
      + ` of ${english(at.prompt)} has its first token after ${seconds(first)} to ${seconds(late)}.`
      + (at.group > 1 ? ` With ${english(at.kv_heads)} key heads for ${english(at.model)} ways, the`
        + ` matrices of each are held ${english(at.group)} times`
        + `${at.layout === CACHES["by key heads"] ? ", and its cache, too" : ""}.` : "")
      + leavesNode(at, leaving(at).includes("model") ? ["a replica"] : []);
  }

  function limit(axis, { has, above, below }, at) {
    const holds = above ? has > above : has < below;
    return row(axis, above ? `over ${three(above)} tokens` : `under ${three(below)} ways`,
      english(has), at[axis] === 1 ? "unused" : holds ? "yes" : "no");
  }

  /* The page. Its state is its fields, which the address repeats; those of the other modes
     are hidden and not read. */
  const CHOICES = ["for", "chip", "recipe", "gathers", "recompute", "base", "gated", "cache",
    "weight_bytes", "cache_bytes"];
  const STATE = [...new Set([...CHOICES.slice(0, 1), ...Object.keys({ ...ADAPTERS, ...GENERATE }),
    ...CHOICES])];
  const { part, field, start } = Form.connect(root, STATE, CHOICES, (texts) => {
    for (const only of root.querySelectorAll("[data-for]"))
      only.hidden = !only.dataset.for.split(" ").includes(texts.for);
    if (texts.for === "generate") showGenerate(readGenerate(texts)); else show(read(texts));
  });

  function showHeld(at, parts) {
    const all = sum(parts.map(([, size]) => size));
    part("held-bar").innerHTML = bar(parts, Math.max(all, at.chip.memory), "Of a device's memory");
    part("held").innerHTML = [
      ...parts.map((entry, i) => row(keyed(entry, i), english(entry[1]))),
      row("Held", english(all)),
      row("A device has", english(at.chip.memory)),
    ].join("");
  }
  function showSent(sizes) {
    const [sentBar, rows] = Form.shares(sizes, 3, "Of what a device sends");
    part("sent-bar").innerHTML = sentBar;
    part("kinds").innerHTML = rows;
  }
  const [BEST, WORST] = ["at best: the longest", "at worst: wires not hidden"];
  const timeRows = (spans, tokens) => Object.entries(spans).map(([name, span]) =>
    row(name, seconds(span), span ? three(tokens / span) : "no limit")).join("");

  function show(at) {
    part("answer").textContent = answer(at);

    const { frozen, weight, gradient, state, gathered, kept, layer, logits } = held(at);
    showHeld(at, [...(at.rank ? [["Frozen base", frozen, 0], ["Adapters", weight, 4]]
      : [["Weights", weight, 0]]), ["Gradients", gradient, 2], ["Optimizer", state, 1],
      ["Kept gathered", gathered, 3], ["Kept for the way back", kept, 5],
      ["The layer at work", layer, 6], ["Logits, with gradient", logits, 7]]);
    showSent(sent(at));
    part("times").innerHTML = timeRows({ ...times(at), [BEST]: leastSeconds(at),
      [WORST]: mostSeconds(at) }, at.tokens);
    part("limits").innerHTML = Object.entries(limits(at)).map(([axis, one]) =>
      limit(axis, one, at)).join("");
    const flops = allFlops(at);
    part("weights").textContent = `The model has ${english(weights(at))} weights, and every token`
      + ` is multiplied with ${english(multiplied(at))} of them.${at.rank ? adapted(at) : ""}`
      + ` Attention's scores and mixing are`
      + ` ${percent(attentionFlops(at), flops)} of the arithmetic, and what is computed a second time`
      + ` ${percent(againFlops(at), flops)}.`;
  }

  function adapted(at) {
    const { data, fsdp } = sent(at);
    return ` Frozen, they take ${bytes(storedBytes(at))}. The adapters have`
      + ` ${english(adapters({ ...at, model: 1 }))} weights, and a device holds`
      + ` ${english(adapters(at))} of these. It sends ${bytes(sentForBase(at))} to gather the base`
      + ` and ${bytes(data + fsdp - sentForBase(at))} to all-reduce the gradients of adapters.`;
  }

  function showGenerate(at) {
    const [step, first] = [decodeTimes, prefillTimes].map((count) =>
      [leastSeconds(at, count), mostSeconds(at, count)]);
    part("answer").textContent = answerGenerate(at, step, first);
    const { weight, cache, logits } = heldToGenerate(at);
    showHeld(at, [["Weights", weight, 0], ["Cache", cache, 5], ["Logits", logits, 7]]);
    showSent(sentToGenerate(at));
    const { arithmetic, wires } = decodeTimes(at);
    part("times").innerHTML = timeRows({ arithmetic, wires,
      "memory: weights": readBytes(at) / at.chip.memorySpeed,
      "memory: cache": lookedAt(at) / at.chip.memorySpeed,
      [BEST]: step[0], [WORST]: step[1] }, at.rows * at.data)
      + timeRows({ "a prompt, at best": first[0], "a prompt, at worst": first[1] }, at.prompt);
    const critical = criticalRows(at);
    part("weights").textContent = `The model has ${english(weights(at))} weights, and a step reads`
      + ` ${bytes(readBytes(at))} of a device's. The cache of a row with ${english(at.positions)}`
      + ` positions is ${bytes(rowBytes(at))}, and a device reads ${bytes(lookedAt(at))} of all.`
      + (critical < Infinity ? ` Arithmetic takes longer than memory over ${three(critical)} rows of a`
        + ` replica; here are ${english(at.rows)}.` : " With so many positions memory takes longer for each row"
        + " than arithmetic, and more rows do not change that.");
  }

  for (const name of Object.keys(CACHES)) field.cache.add(new Option(name));
  for (const name of Object.keys(CHIPS)) field.chip.add(new Option(name));
  for (const name of Object.keys(RECIPES)) field.recipe.add(new Option(name));
  for (const name of Object.keys(BASES)) field.base.add(new Option(name));
  start();
})();
