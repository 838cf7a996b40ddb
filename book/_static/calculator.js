/* The calculator of a training step: what one device holds and sends, and what binds.
   Calculator.read reads what is typed, and the others count as chapter 26 does, all without
   a page. A case holds the sizes of the model, the batch, the chip and the layout. */
"use strict";
(() => {
  const { productOf, sum, english, percent, check, bar, row, keyed } = Form;
  const AXES = ["data", "fsdp", "model"];
  const LABELS = {
    layers: "Layers", width: "Width", hidden: "MLP width", heads: "Heads",
    kv_heads: "Key heads", head_size: "Head size", vocabulary: "Vocabulary",
    tokens: "Tokens", sequence: "Sequence length", devices: "Devices",
    axes: "Axes of links", node: "Devices of a node", network: "Network, GB/s",
    data: "data", fsdp: "fsdp", model: "model",
  };
  const LARGEST = 1e9;
  const BF16 = 2; // bytes of a number that is sent, or kept for the way back
  const F32 = 4; // bytes of a logit
  const GIB = 2 ** 30;
  const TIGHT = 0.9; // of a device's memory; above it scratch space may not fit

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

  const total = (parts) => sum(Object.values(parts));

  /* What has to divide what, and why. */
  const RULES = [
    ["heads", ["kv_heads"], "Every head of keys and values serves equally many queries."],
    ["heads", ["model"], "Every device has equally many heads."],
    ["hidden", ["model"], "Every device has equally many hidden features."],
    ["vocabulary", ["model"], "Every device has equally many rows of the table."],
    ["width", ["fsdp"], "Weights that are sharded are cut there."],
    ["tokens", ["sequence", "data", "fsdp"], "Every replica and shard has equally many sequences."],
  ];

  /* A case from an object of texts. What cannot be read or counted, or does not divide,
     throws an Error, whose `field` names the culprit. */
  function read(texts) {
    const [flops, memory, memorySpeed, axisSpeed, axes] = CHIPS[texts.chip];
    const at = {
      chip: { flops, memory, memorySpeed, axisSpeed, axes, hasNodes: !texts.chip.startsWith("TPU") },
      recipe: RECIPES[texts.recipe],
      again: texts.recompute === "every layer",
      gathers: texts.gathers === "twice" ? 2 : 1,
      matrices: texts.gated === "yes" ? 3 : 2,
      ...Form.wholeNumbers(texts, LABELS, LARGEST),
    };
    const ways = productOf(at, AXES);
    check(ways === at.devices, "devices", `Devices is ${english(at.devices)}, and`,
      `${AXES.join(" × ")} = ${english(ways)}.`,
      ways <= LARGEST ? `Write ${english(ways)}, or change` : "Change", "data, fsdp or model.");
    check(at.axes <= axes, "axes", `Axes of links is ${english(at.axes)}, and ${texts.chip}`,
      `has ${axes}. Write ${axes === 1 ? "1" : `1 to ${axes}`}.`);
    Form.checkRules(at, RULES, LABELS, LARGEST, (name) => LABELS[name], english);
    check(Number.isSafeInteger(sum(at.recipe) * weights(at)), "width",
      "The model has more bytes than this page can count. Take a smaller width.");
    check(Number.isSafeInteger(Math.ceil(total(held(at)) + total(sent(at)))), "tokens",
      "A device has more bytes to hold and send than this page can count. Take fewer tokens.");
    return at;
  }

  /* The model: its weights, those that every token is multiplied with, and FLOPs of a step
     on all devices together. */
  const inLayer = ({ width, hidden, heads, kv_heads, head_size, matrices }) =>
    2 * width * head_size * (heads + kv_heads) + matrices * width * hidden;
  const weights = (at) => at.layers * inLayer(at) + 2 * at.vocabulary * at.width;
  const multiplied = (at) => at.layers * inLayer(at) + at.vocabulary * at.width;
  const stepFlops = (at) => 6 * multiplied(at) * at.tokens;
  const attentionFlops = ({ layers, tokens, sequence, heads, head_size }) =>
    12 * layers * tokens * sequence * heads * head_size;
  /* What is computed a second time if layers keep their inputs alone: the way forward, but
     for the last product of each layer, and attention's third of it. */
  const againFlops = (at) => (at.again ? attentionFlops(at) / 3
    + 2 * at.layers * (inLayer(at) - at.width * at.hidden) * at.tokens : 0);
  const allFlops = (at) => stepFlops(at) + attentionFlops(at) + againFlops(at);

  const gather = (bytes, n) => (n - 1) / n * bytes; // on a ring; a scatter sends as many

  /* Bytes that one device sends in a step, by axis of the mesh. */
  function sent(at) {
    const { layers, tokens, width, gathers, data, fsdp, model } = at;
    const strip = BF16 * weights(at) / model;
    const activation = BF16 * width * tokens / (data * fsdp);
    return {
      data: 2 * gather(strip / fsdp, data),
      fsdp: (gathers + 1) * gather(strip, fsdp),
      // two blocks, there and back, and the first once more if it is computed again
      model: 2 * layers * (at.again ? 5 : 4) * gather(activation, model),
    };
  }

  /* Bytes that one device holds, by what they are. */
  function held(at) {
    const { layers, width, tokens, gathers, data, fsdp, model } = at;
    const [weight, gradient, state] = at.recipe.map((size) => size * weights(at) / (fsdp * model));
    const gathered = gathers === 1 ? gather(BF16 * weights(at) / model, fsdp) : 0;
    const here = BF16 * tokens / (data * fsdp);
    const whole = here * (4 * width + (2 * at.head_size * (at.heads + at.kv_heads)
      + at.matrices * at.hidden) / model); // what the products of a layer need on the way back
    const kept = layers * (at.again ? here * width : whole);
    const layer = (gathers === 2 ? gather(BF16 * inLayer(at) / model, fsdp) : 0)
      + (at.again ? whole : 0);
    const logits = 2 * F32 * tokens / (data * fsdp) * at.vocabulary / model;
    return { weight, gradient, state, gathered, kept, layer, logits };
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

  /* Seconds of one step, each alone. What is held is read once and written once. */
  function times(at) {
    const { flops, memorySpeed } = at.chip;
    return {
      arithmetic: allFlops(at) / at.devices / flops,
      wires: sum(Object.entries(sent(at)).map(([axis, size]) => size / speed(at, axis))),
      memory: 2 * total(held(at)) / memorySpeed,
    };
  }
  const leastSeconds = (at) => Math.max(...Object.values(times(at)));
  /* One after the other, and all that is sent along one axis of links. */
  function mostSeconds(at) {
    const { arithmetic, wires, memory } = times({ ...at, axes: 1 });
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

  globalThis.Calculator = { CHIPS, RECIPES, read, weights, multiplied, stepFlops, attentionFlops,
    againFlops, sent, held, speed, times, leastSeconds, mostSeconds, binds, limits };
  const root = document.querySelector("#explorer");
  if (!root) return;

  /* Words. Those that become HTML hold numbers and names that stand above. */
  const three = (n) => n.toLocaleString("en", { maximumSignificantDigits: 3 });
  const seconds = (n) => (n >= 1 || n === 0 ? `${three(n)} s`
    : n >= 1e-3 ? `${three(1e3 * n)} ms` : `${three(1e6 * n)} µs`);
  function bytes(n) {
    const power = n < 1000 ? 0 : Math.floor(Math.log10(n) / 3);
    return `${three(n / 1000 ** power)} ${["bytes", "kB", "MB", "GB", "TB", "PB"][power]}`;
  }

  function answer(at) {
    const [alone, holds, has] = [times(at), total(held(at)), at.chip.memory];
    const [least, most, binding] = [leastSeconds(at), mostSeconds(at), binds(alone)];
    const beyond = leaving(at);
    return `${at.devices === 1 ? "The one device" : `Each of ${english(at.devices)} devices`} `
      + (holds <= TIGHT * has ? `holds ${bytes(holds)} of its ${bytes(has)}.`
        : holds <= has ? `holds ${bytes(holds)} of its ${bytes(has)}: less than a tenth is left,`
          + " and the compiler's scratch space may not fit."
        : `would hold ${bytes(holds)}, and has ${bytes(has)}: this does not fit.`)
      + ` It sends ${bytes(total(sent(at)))} in a step, which takes ${seconds(least)} at best,`
      + ` where ${binding} ${binding === "wires" ? "bind" : "binds"}, and ${seconds(most)} at worst:`
      + ` ${three(at.tokens / least)} to ${three(at.tokens / most)} tokens a second, with the`
      + ` arithmetic at ${percent(alone.arithmetic, least)} to`
      + ` ${percent(alone.arithmetic, most)} of its peak.`
      + (beyond.length ? ` What ${beyond.join(" and ")} ${beyond.length > 1 ? "send" : "sends"} leaves`
        + ` the node of ${english(at.node)} and waits for the network.` : "");
  }

  function limit(axis, { has, above, below }, at) {
    const holds = above ? has > above : has < below;
    return row(axis, above ? `over ${three(above)} tokens` : `under ${three(below)} ways`,
      english(has), at[axis] === 1 ? "unused" : holds ? "yes" : "no");
  }

  /* The page. Its state is its fields, which the address repeats. */
  const CHOICES = ["chip", "recipe", "gathers", "recompute", "gated"];
  const STATE = [...Object.keys(LABELS), ...CHOICES];
  const { part, field, start } =
    Form.connect(root, STATE, CHOICES, (texts) => show(read(texts)));

  function show(at) {
    part("answer").textContent = answer(at);

    const { weight, gradient, state, gathered, kept, layer, logits } = held(at);
    const parts = [["Weights", weight, 0], ["Gradients", gradient, 2], ["Optimizer", state, 1],
      ["Kept gathered", gathered, 3], ["Kept for the way back", kept, 5],
      ["The layer at work", layer, 6], ["Logits, with gradient", logits, 7]];
    const all = Math.max(total(held(at)), at.chip.memory);
    part("held-bar").innerHTML = bar(parts, all, "Of a device's memory");
    part("held").innerHTML = [
      ...parts.map((entry, i) => row(keyed(entry, i), english(entry[1]))),
      row("Held", english(total(held(at)))),
      row("A device has", english(at.chip.memory)),
    ].join("");

    const whole = total(sent(at));
    const kinds = Object.entries(sent(at)).map(([name, size], i) => [name, size, i + 3]);
    part("sent-bar").innerHTML = bar(kinds, whole, "Of what a device sends");
    part("kinds").innerHTML = kinds.map((entry, i) =>
      row(keyed(entry, i), english(entry[1]), percent(entry[1], whole))).join("")
      + row("All", english(whole), percent(whole, whole));

    const alone = times(at);
    const spans = { ...alone, "at best: the longest": leastSeconds(at),
      "at worst: wires not hidden": mostSeconds(at) };
    part("times").innerHTML = Object.entries(spans).map(([name, span]) =>
      row(name, seconds(span), span ? three(at.tokens / span) : "no limit")).join("");
    part("limits").innerHTML = Object.entries(limits(at)).map(([axis, one]) =>
      limit(axis, one, at)).join("");
    const flops = allFlops(at);
    part("weights").textContent = `The model has ${english(weights(at))} weights, and every token`
      + ` is multiplied with ${english(multiplied(at))} of them. Attention's scores and mixing are`
      + ` ${percent(attentionFlops(at), flops)} of the arithmetic, and what is computed a second time`
      + ` ${percent(againFlops(at), flops)}.`;
  }

  for (const name of Object.keys(CHIPS)) field.chip.add(new Option(name));
  for (const name of Object.keys(RECIPES)) field.recipe.add(new Option(name));
  start();
})();
