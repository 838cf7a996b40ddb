/* The calculator of one step of full fine-tuning, of LoRA, or of decoding: memory, bytes
   sent and time of one device. Calculator.read and Calculator.generate.read parse the
   fields; all other functions of Calculator are pure and need no page. A case `at` holds the
   sizes of the model, the batch, the chip and the layout. */
"use strict";
(() => {
  const { product, productOf, sum, english, three, percent, bytes, check, bar, row, keyed } = Form;
  const AXES = ["pipe", "data", "fsdp", "seq", "model"]; // of the mesh, slowest first
  const BOTH = {
    layers: "Layers", width: "Hidden size", hidden: "Intermediate size",
    heads: "Attention heads", kv_heads: "KV heads", head_size: "Head dimension",
    vocabulary: "Vocabulary size", axes: "Link axes", node: "Devices per node or slice",
    network: "Network, GB/s",
  };
  const TRAIN = { ...BOTH, tokens: "Tokens", sequence: "Sequence length", devices: "Devices",
    ...Object.fromEntries(AXES.map((axis) => [axis, axis])) };
  const ADAPTERS = { ...TRAIN, rank: "Rank" };
  const GENERATE = { ...BOTH, rows: "Sequences", positions: "Cache length",
    prompt: "Prompt tokens", used: "Prefill, % of peak", replicas: "Replicas",
    ways: "Tensor parallelism" };
  const LARGEST = 1e9;
  const MOST_LISTED = 65536; // devices whose layouts are listed
  const BF16 = 2; // bytes of an activation, or of an element that is sent
  const F32 = 4; // bytes of a logit
  const GIB = 2 ** 30;
  const TIGHT = 0.9; // of a device's memory; above it temporary memory may not fit

  /* The table of chapter 5, whose fields and sources are in book/cells/chips.py: a test compares
     them. Rates are bytes/s; a domain is what links or one switch connect. */
  const FIELDS = ["flops", "memory", "memoryBandwidth", "axisBandwidth", "axes", "domain",
    "network", "latency", "isSwitch"];
  const CHIPS = Object.fromEntries(Object.entries({
    "TPU v5e": [197e12, 16e9, 819e9, 100e9, 2, 256, 25e9 / 8, 1e-6, false],
    "TPU v5p": [459e12, 95 * GIB, 2765e9, 200e9, 3, 8960, 6.25e9, 1e-6, false],
    "TPU v6e": [918e12, 32 * GIB, 1638e9, 200e9, 2, 256, 12.5e9, 1e-6, false],
    "TPU7x": [2307e12 / 2, 96 * GIB, 7380e9 / 2, 200e9, 3, 18432, 6.25e9, 1e-6, false],
    "TPU v4": [275e12, 32 * GIB, 1200e9, 90e9, 3, 4096, 6.25e9, 1e-6, false],
    "H100": [989e12, 80e9, 3350e9, 450e9, 1, 8, 50e9, 3e-6, true],
    "A100": [312e12, 80e9, 2039e9, 300e9, 1, 8, 25e9, 3e-6, true],
    "H200": [989e12, 141e9, 4800e9, 450e9, 1, 8, 50e9, 3e-6, true],
    "B200": [2250e12, 179e9, 8000e9, 900e9, 1, 8, 50e9, 3e-6, true],
    "GB200 NVL72": [2500e12, 186e9, 8000e9, 900e9, 1, 72, 50e9, 3e-6, true],
  }).map(([name, row]) => [name, Object.fromEntries(FIELDS.map((key, i) => [key, row[i]]))]));

  /* bytes_sent of chapter 5: bytes that one device of n sends, those that it forwards included;
     `size` are those of its operand or result, whichever is larger. */
  function bytesSent(collective, size, n, isSwitch) {
    const each = { "all-reduce": 2 * (n - 1), "all-gather": n - 1, "reduce-scatter": n - 1,
      "all-to-all": isSwitch ? n - 1 : Math.floor(n * n / 4), "collective-permute": n };
    return each[collective] * size / n;
  }
  /* Its collective_seconds: the devices are a closed ring along each axis, or share a switch;
     `sides` are the devices along each axis, and a permute is to a neighbour. */
  function collectiveSeconds(collective, size, sides, chip) {
    const { axisBandwidth, latency, isSwitch } = chip;
    if (collective === "collective-permute")
      return latency + size / (axisBandwidth / (isSwitch ? 1 : 2)); // one link
    const n = product(sides);
    const hops = isSwitch ? Math.min(n - 1, 1) : sum(sides.map((side) => Math.floor(side / 2)));
    const laps = collective === "all-reduce" ? 2 : 1;
    const bytes = collective === "all-to-all"
      ? Math.max(...sides.map((side) => bytesSent(collective, size, side, isSwitch)))
      : bytesSent(collective, size, n, isSwitch) / sides.length;
    return laps * hops * latency + bytes / axisBandwidth;
  }
  /* The devices along each of so many axes, as nearly equal as n can be divided. */
  function sidesOf(n, axes) {
    if (axes === 1) return [n];
    let side = Math.floor(n ** (1 / axes) + 1e-9);
    while (n % side > 0) side -= 1;
    return [side, ...sidesOf(n / side, axes - 1)];
  }

  /* Bytes for each weight: itself, its gradient, and the rest of the training state. */
  const RECIPES = { "Adam f32": [2, 2, 12], "Adam bf16": [2, 2, 4], "SGD": [2, 2, 0] };
  /* Bytes of a layer's projections in a frozen base, with a scale for each output (int8) or
     for each 64 weights (int4, as in QLoRA). */
  const BASES = {
    "bfloat16": (at) => BF16 * inLayer(at),
    "int8": (at) => inLayer(at) + F32 * outputs(at),
    "int4": (at) => (1 / 2 + F32 / 64) * inLayer(at),
  };

  const total = (parts) => sum(Object.values(parts));

  /* [size, divisors, reason]: the product of the divisors has to divide the size. */
  const SPLITS = [
    ["heads", ["kv_heads"], "Each KV head serves the same number of query heads."],
    ["heads", ["model"], "Each device has the same number of heads."],
    ["hidden", ["model"], "Each device has the same number of hidden features."],
    ["vocabulary", ["model"], "Each device has the same number of rows of the table."],
  ];
  const RULES = [
    ...SPLITS,
    ["layers", ["pipe"], "Each stage has the same number of layers."],
    ["width", ["fsdp"], "FSDP shards the weights along this dimension."],
    ["sequence", ["seq"], "Each device has an equal part of each sequence."],
    ["tokens", ["sequence", "data", "fsdp"], "Each replica and shard has the same number of sequences."],
  ];

  const OF_THE_CHIP = ["node", "network"]; // fields that take the chip's value if they are empty

  /* Parse a case from an object of texts. Throws an Error, whose `field` names the input,
     for text that is no number, a number out of range, and a size that does not divide. */
  function readBoth(texts, labels) {
    const chip = CHIPS[texts.chip];
    const { axes } = chip;
    const empty = OF_THE_CHIP.filter((name) => !texts[name].trim());
    const typed = Object.entries(labels).filter(([name]) => !empty.includes(name));
    const at = {
      chip,
      matrices: texts.gated === "yes" ? 3 : 2,
      node: chip.domain,
      network: chip.network / 1e9,
      ...Form.wholeNumbers(texts, Object.fromEntries(typed), LARGEST),
    };
    check(at.axes <= axes, "axes", `Link axes is ${english(at.axes)}, but ${texts.chip} has`,
      `${axes}. Enter ${axes === 1 ? "1" : `1 to ${axes}`}.`);
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
    const size = productOf(at, AXES);
    check(size === at.devices, "devices", `Devices is ${english(at.devices)}, but`,
      `${AXES.join(" × ")} = ${english(size)}.`,
      size <= LARGEST ? `Enter ${english(size)}, or change` : "Change", "an axis of the mesh.");
    Form.checkRules(at, RULES, TRAIN, LARGEST);
    return at;
  }

  /* The model: its weights, those that every token is multiplied with, and FLOPs of a step
     on all devices together. */
  const inLayer = ({ width, hidden, heads, kv_heads, head_size, matrices }) =>
    2 * width * head_size * (heads + kv_heads) + matrices * width * hidden;
  const inTables = ({ vocabulary, width }) => 2 * vocabulary * width;
  const weights = (at) => at.layers * inLayer(at) + inTables(at);
  const outputs = ({ width, hidden, heads, kv_heads, head_size, matrices }) =>
    head_size * (heads + 2 * kv_heads) + 2 * width + (matrices - 1) * hidden;
  /* The sides of a layer's projections that `model` shards; the others have the hidden size. */
  const shardedSides = ({ hidden, heads, kv_heads, head_size, matrices }) =>
    2 * head_size * (heads + kv_heads) + matrices * hidden;
  const storedBytes = (at) => at.layers * at.base(at) + BF16 * inTables(at);
  /* Elements of all layers' adapters on a device: `model` alone shards them. */
  const adapters = (at) => at.rank * at.layers
    * ((4 + at.matrices) * at.width + shardedSides(at) / at.model);
  const multiplied = (at) => at.layers * inLayer(at) + at.vocabulary * at.width;
  /* A frozen weight has no gradient, and each device of `model` computes the unsharded sides. */
  const stepFlops = (at) => ((at.rank ? 4 : 6) * multiplied(at) + 6 * at.model * adapters(at))
    * at.tokens;
  const attentionFlops = ({ layers, tokens, sequence, heads, head_size }) =>
    12 * layers * tokens * sequence * heads * head_size;
  /* Recomputation of layers that keep their inputs only: the forward pass, without the last
     product of each layer, and a third of attention's FLOPs. */
  const againFlops = (at) => (at.again ? attentionFlops(at) / 3
    + 2 * at.layers * (inLayer(at) - at.width * at.hidden) * at.tokens
    + 2 * at.model * (adapters(at) - at.layers * at.rank * at.width) * at.tokens : 0);
  const allFlops = (at) => stepFlops(at) + attentionFlops(at) + againFlops(at);

  /* A pipeline: as many microbatches as the sequences of a replica allow, but at most 16, or
     4 for each stage. Each of its ticks runs a stage's layers on one microbatch. */
  function pipeline({ layers, tokens, sequence, pipe, data, fsdp, seq }) {
    const sequences = tokens / (sequence * data * fsdp);
    let microbatches = pipe === 1 ? 1 : Math.min(sequences, Math.max(16, 4 * pipe));
    while (sequences % microbatches > 0) microbatches -= 1;
    const ticks = microbatches + pipe - 1;
    const local = tokens / (data * fsdp * seq); // tokens of a device
    return { microbatches, ticks, runs: ticks * layers / pipe, local, micro: local / microbatches };
  }

  const gather = (bytes, n) => (n - 1) / n * bytes; // on a ring; a scatter sends as many

  /* Bytes that one device sends in a step, by axis of the mesh. */
  function sent(at) {
    const { width, rank, matrices, again, pipe, data, fsdp, seq, model } = at;
    const { runs, micro } = pipeline(at);
    const tables = BF16 * inTables(at) / (fsdp * model); // each stage has both
    const gradients = rank ? BF16 * adapters(at) / pipe
      : (BF16 * at.layers * inLayer(at) / (pipe * model) + tables * fsdp);
    const shard = gradients / fsdp;
    const scattered = rank ? 2 * gradients // adapters are not sharded by fsdp
      : gradients + (scatters(at) - 1) * (gradients - tables * fsdp);
    // two blocks, forward and backward, and the first once more if it is recomputed; of each
    // adapter what lies between its two matrices, forward for two and backward for the others
    const summed = (again ? 5 : 4) * width + ((again ? 6 : 4) + matrices) * rank;
    return {
      pipe: permuted(at).pipe + (rank ? 0 : 2 * gather(tables / (seq * data), pipe)),
      data: 2 * gather(shard / seq, data),
      fsdp: sentForBase(at) + gather(scattered, fsdp),
      seq: permuted(at).seq + 2 * gather(shard, seq),
      model: 2 * runs * gather(BF16 * summed * micro, model),
    };
  }
  /* What of these bytes is sent to one neighbour: activations, and keys and values. */
  function permuted(at) {
    const { width, again, kv_heads, head_size, pipe, seq, model } = at;
    const { ticks, runs, micro } = pipeline(at);
    const keysAndValues = 2 * BF16 * micro * kv_heads * head_size / model;
    return {
      pipe: pipe === 1 ? 0 : 2 * ticks * BF16 * micro * width,
      seq: runs * (seq - 1) * (again ? 3 : 2) * keysAndValues,
    };
  }
  /* How often fsdp gathers and scatters a layer: with a pipeline, forward once, and backward in
     each tick. */
  const scatters = (at) => (at.gathers === 2 ? pipeline(at).ticks : 1);
  const sentForBase = (at) => gather(at.gathers * BF16 * inTables(at) + (at.gathers - 1 + scatters(at))
    * at.layers * at.base(at) / at.pipe, at.fsdp) / at.model;

  /* Bytes that one device stores, by what they are. */
  function held(at) {
    const { width, gathers, rank, pipe, fsdp, model } = at;
    const { runs, local, micro } = pipeline(at);
    const stage = { ...at, layers: at.layers / pipe };
    const frozen = rank ? storedBytes(stage) / (fsdp * model) : 0;
    const trained = rank ? adapters(stage) : weights(stage) / (fsdp * model);
    const [weight, gradient, state] = at.recipe.map((size) => size * trained);
    const gathered = gathers === 1 ? gather(storedBytes(stage) / model, fsdp) : 0;
    // what the backward pass of a layer reads, for one microbatch
    const all = BF16 * micro * (4 * width + shardedSides(at) / model + (4 + at.matrices) * rank);
    const activations = runs * (at.again ? BF16 * micro * width : all);
    const layer = (gathers === 2 ? gather(at.base(at) / model, fsdp) : 0) + (at.again ? all : 0);
    const logits = 2 * F32 * local * at.vocabulary / model;
    return { frozen, weight, gradient, state, gathered, activations, layer, logits };
  }

  /* Bytes/s of the rings along an axis of the mesh: those of the links, or, where a ring leaves
     the node or the slice, of the network cards of its members in one. A permute to a neighbour
     has one link. The last axis varies fastest in the device order. */
  function speed(at, axis, links = at.axes * at.chip.axisBandwidth) {
    const inner = productOf(at, AXES.slice(AXES.indexOf(axis) + 1));
    const isInside = at.devices <= at.node || at.node % (inner * at[axis]) === 0;
    if (at[axis] === 1 || isInside) return links;
    return Math.min(links, Math.max(1, Math.floor(at.node / inner)) * at.network * 1e9);
  }
  const linkSpeed = (at, axis) =>
    speed(at, axis, at.chip.axisBandwidth / (at.chip.isSwitch ? 1 : 2));
  const leaving = (at) => AXES.filter((axis) => speed(at, axis) < at.axes * at.chip.axisBandwidth);

  /* Seconds of one step, each alone. What is stored is read once and written once, unless it
     is frozen; a pipeline computes in all ticks, also where it has no microbatch. */
  function times(at) {
    const { flops, memoryBandwidth } = at.chip;
    const { ticks, microbatches } = pipeline(at);
    const hops = permuted(at);
    const seconds = (axis, size) =>
      (size - (hops[axis] ?? 0)) / speed(at, axis) + (hops[axis] ?? 0) / linkSpeed(at, axis);
    return {
      compute: allFlops(at) / at.devices / flops * ticks / microbatches,
      communication: sum(Object.entries(sent(at)).map(([axis, size]) => seconds(axis, size))),
      memory: (2 * total(held(at)) - held(at).frozen) / memoryBandwidth,
    };
  }
  const leastSeconds = (at, count = times) => Math.max(...Object.values(count(at)));
  /* Communication overlaps with nothing, and uses one axis of links. */
  function mostSeconds(at, count = times) {
    const { compute, communication, memory } = count({ ...at, axes: 1 });
    return Math.max(compute, memory) + communication;
  }
  const bound = (alone) => Object.keys(alone).reduce((a, b) => (alone[b] > alone[a] ? b : a));

  /* All layouts of as many devices that the sizes allow: first those that fit, then by the
     times at best and at worst. */
  function layouts(at) {
    if (at.devices > MOST_LISTED) return [];
    const factors = [...Array(at.devices + 1).keys()].filter((n) => at.devices % n === 0);
    const along = (found, axis) => found.flatMap((one) => factors
      .filter((n) => at.devices % (n * productOf(one, AXES)) === 0)
      .map((n) => ({ ...one, [axis]: n }))
      .filter((more) => !Form.broken(more, RULES)));
    const single = { ...at, ...Object.fromEntries(AXES.map((axis) => [axis, 1])) };
    return AXES.reduce(along, [single])
      .filter((layout) => productOf(layout, AXES) === at.devices)
      .map((layout) => ({ layout, holds: total(held(layout)),
        best: leastSeconds(layout), worst: mostSeconds(layout) }))
      .sort((a, b) => (a.holds > at.chip.memory) - (b.holds > at.chip.memory)
        || a.best - b.best || a.worst - b.worst || a.holds - b.holds);
  }

  /* Generating. A case has `data` replicas of `model` devices, which shard the KV heads
     `keyWays` ways, so that `group` devices share each; `rows` are the sequences of one
     replica. A layout of the cache has the number of its shards, further rules, and what a
     layer sends for it: [times, collective, bytes, devices]. */
  const CACHES = {
    "by KV heads": { shards: (at) => at.keyWays, rules: [], sends: () => [] },
    "by KV heads and positions": {
      shards: (at) => at.model,
      rules: [["positions", ["group"], "Each of them has the same number of positions."]],
      sends: (at) => [
        [1, "all-gather", queries(at) / at.keyWays, at.group],
        [1, "reduce-scatter", queries(at) / at.keyWays, at.group], // of the results
        [1, "all-reduce", F32 * at.rows * at.heads / at.keyWays, at.group], // maxima of the softmax
        [1, "reduce-scatter", F32 * at.rows * at.heads / at.keyWays, at.group], // and its sums
      ],
    },
    "by KV heads and sequences": {
      shards: (at) => at.model,
      rules: [["rows", ["data", "group"], "Each of them has the same number of sequences."]],
      sends: (at) => [[2, "all-to-all", queries(at) / at.model, at.group]], // to their sequences, and back
    },
    "replicated": { shards: () => 1, rules: [], sends: (at) => [[2, "all-gather", keys(at), at.keyWays]] },
  };
  const queries = (at) => BF16 * at.rows * at.heads * at.head_size;
  const keys = (at) => BF16 * at.rows * at.kv_heads * at.head_size;

  function readGenerate(texts) {
    const at = { ...readBoth(texts, GENERATE), layout: CACHES[texts.cache], pipe: 1, fsdp: 1, seq: 1,
      weightBytes: Number(texts.weight_bytes), cacheBytes: Number(texts.cache_bytes) };
    [at.data, at.model, at.devices] = [at.replicas, at.ways, at.replicas * at.ways];
    at.keyWays = Form.divisor(at.kv_heads, at.model);
    at.group = at.model / at.keyWays;
    check(at.prompt <= at.positions, "prompt", `Prompt tokens is ${english(at.prompt)}, but`,
      `Cache length is ${english(at.positions)}. Enter a shorter prompt, or a longer cache.`);
    check(at.used <= 100, "used", "Prefill, % of peak is over 100. Enter at most 100.");
    Form.checkRules(at, [...SPLITS, ["rows", ["data"], "Each replica has the same number of sequences."],
      ...at.layout.rules], { ...GENERATE, data: "Replicas", model: "Tensor parallelism",
      group: "devices per KV head" }, LARGEST);
    at.rows /= at.data;
    return at;
  }

  /* Copies of K and V projections within a group, times the devices of a replica; bytes of
     the weights that a step reads, and of one sequence's unsharded cache. */
  const repeated = ({ layers, width, head_size, kv_heads, group }) =>
    (group - 1) * 2 * layers * width * head_size * kv_heads;
  const readWeights = (at) => at.weightBytes * (multiplied(at) + repeated(at)) / at.model;
  const rowBytes = ({ layers, kv_heads, head_size, positions, cacheBytes }) =>
    cacheBytes * 2 * layers * kv_heads * head_size * positions;
  /* A device with a replicated cache reads only the KV heads of its own queries. */
  const readCache = (at) => at.rows * rowBytes(at) / Math.max(at.layout.shards(at), at.keyWays);

  function heldToGenerate(at) {
    return {
      weight: at.weightBytes * (weights(at) + repeated(at)) / at.model,
      cache: at.rows * rowBytes(at) / at.layout.shards(at),
      logits: F32 * at.rows * at.vocabulary / at.model,
    };
  }
  /* The largest batch over all replicas that leaves a tenth of the memory free. */
  function mostRows(at) {
    const { weight, cache, logits } = heldToGenerate({ ...at, rows: 1 });
    const step = at.layout === CACHES["by KV heads and sequences"] ? at.group : 1; // sequences of a replica
    const most = Math.min((TIGHT * at.chip.memory - weight) / (cache + logits), LARGEST / at.data);
    return Math.max(0, Math.floor(most / step)) * step * at.data;
  }
  /* The sequences of a replica above which compute takes longer than memory. */
  function criticalRows(at) {
    const { flops, memoryBandwidth } = at.chip;
    const one = { ...at, rows: 1 };
    const gain = decodeFlops(one) / at.model / flops - readCache(one) / memoryBandwidth;
    return gain > 0 ? readWeights(at) / memoryBandwidth / gain : Infinity;
  }

  const scores = (at, tokens, sequence) => attentionFlops({ ...at, tokens, sequence }) / 3;
  const decodeFlops = (at) => 2 * (multiplied(at) + repeated(at)) * at.rows
    + scores(at, at.rows, at.positions);
  const prefillFlops = (at) => scores(at, at.prompt, at.prompt) // the head: for the last token only
    + 2 * ((at.layers * inLayer(at) + repeated(at)) * at.prompt + at.vocabulary * at.width);

  /* The all-reduces of the blocks and of the embedding, and what the cache's layout sends. */
  const sums = (at, tokens) =>
    [[2 * at.layers + 1, "all-reduce", BF16 * tokens * at.width, at.model]];
  const forCache = (at) => at.layout.sends(at).map(([n, ...rest]) => [n * at.layers, ...rest]);
  const ringBytes = (at, rings) => sum(rings.map(([times, collective, size, n]) =>
    times * bytesSent(collective, size, n, at.chip.isSwitch)));
  const sentToGenerate = (at) =>
    ({ sums: ringBytes(at, sums(at, at.rows)), cache: ringBytes(at, forCache(at)) });
  /* Seconds of collectives within a replica, whose ring may leave the node. */
  function ringSeconds(at, rings) {
    const chip = { ...at.chip, axisBandwidth: speed(at, "model") / at.axes };
    return sum(rings.map(([times, collective, size, n]) =>
      times * collectiveSeconds(collective, size, sidesOf(n, at.axes), chip)));
  }

  /* Seconds of a decode step, and of the prefill of one prompt. */
  const decodeTimes = (at) => ({
    compute: decodeFlops(at) / at.model / at.chip.flops,
    communication: ringSeconds(at, [...sums(at, at.rows), ...forCache(at)]),
    memory: (readWeights(at) + readCache(at)) / at.chip.memoryBandwidth,
  });
  const prefillTimes = (at) => ({
    compute: prefillFlops(at) / at.model / (at.chip.flops * at.used / 100),
    communication: ringSeconds(at, sums(at, at.prompt)),
    memory: readWeights(at) / at.chip.memoryBandwidth,
  });

  globalThis.Calculator = { CHIPS, FIELDS, RECIPES, bytesSent, collectiveSeconds, sidesOf, read,
    weights, multiplied, stepFlops, attentionFlops, againFlops, sent, permuted, held, pipeline,
    speed, linkSpeed, times, leastSeconds, mostSeconds, bound, layouts,
    generate: { CACHES, read: readGenerate, held: heldToGenerate, sent: sentToGenerate,
      mostRows, criticalRows, decodeTimes, prefillTimes } };
  const root = document.querySelector("#explorer");
  if (!root) return;

  /* Words. Those that become HTML contain only numbers and the names above. */
  const seconds = (n) => (n >= 1 || n === 0 ? `${three(n)} s`
    : n >= 1e-3 ? `${three(1e3 * n)} ms` : `${three(1e6 * n)} µs`);
  const memory = (at, holds, has = at.chip.memory) =>
    `${at.devices === 1 ? "The one device" : `Each of ${english(at.devices)} devices`} needs`
    + ` ${bytes(holds)} of its ${bytes(has)}`
    + (holds <= TIGHT * has ? "." : holds <= has
      ? ": less than a tenth is left, and temporary memory may not fit." : ": this does not fit.");
  const stepTakes = (sends, least, most, bound) =>
    ` It sends ${bytes(sends)} per step. A step is ${bound} and takes ${seconds(least)} at`
    + ` best and ${seconds(most)} at worst:`;
  const leavesNode = (at, names) => (names.length
    ? ` The rings of ${names.join(" and ")} leave the ${at.chip.isSwitch ? "node" : "slice"} of`
      + ` ${english(at.node)} and use the network.` : "");

  function answer(at) {
    const { compute } = times(at);
    const [least, most] = [leastSeconds(at), mostSeconds(at)];
    return memory(at, total(held(at)))
      + stepTakes(total(sent(at)), least, most, `${bound(times(at))}-bound`)
      + ` ${three(at.tokens / least)} to ${three(at.tokens / most)} tokens/s, compute busy for`
      + ` ${percent(compute, least)} to ${percent(compute, most)} of the time.`
      + leavesNode(at, leaving(at));
  }

  function answerGenerate(at, [least, most], [first, late]) {
    const rows = mostRows(at);
    return memory(at, total(heldToGenerate(at)))
      + ` With a tenth left free, ${rows ? `at most ${english(rows)}` : "no"} sequences fit.`
      + stepTakes(total(sentToGenerate(at)), least, most, `${bound(decodeTimes(at))}-bound`)
      + ` ${three(1 / least)} to ${three(1 / most)} tokens/s for each sequence, and`
      + ` ${three(at.rows * at.data / least)} to ${three(at.rows * at.data / most)} in total. Time to`
      + ` first token of a prompt of ${english(at.prompt)}: ${seconds(first)} to ${seconds(late)}.`
      + (at.group > 1 ? ` With ${english(at.kv_heads)} KV heads on ${english(at.model)} devices,`
        + ` ${english(at.group)} devices have a copy of each KV head's weights`
        + `${at.layout === CACHES["by KV heads"] ? ", and of its cache" : ""}.` : "")
      + leavesNode(at, leaving(at).includes("model") ? ["tensor parallelism"] : []);
  }

  /* The page. Its state is its fields, which the address repeats; those of the other modes
     are hidden and not read. */
  const CHOICES = ["for", "chip", "recipe", "gathers", "recompute", "base", "gated", "cache",
    "weight_bytes", "cache_bytes"];
  const STATE = [...new Set(["for", ...Object.keys({ ...ADAPTERS, ...GENERATE }), ...CHOICES])];
  const { part, field, take, start } = Form.connect(root, STATE, CHOICES, (texts) => {
    for (const only of root.querySelectorAll("[data-for]"))
      only.hidden = !only.dataset.for.split(" ").includes(texts.for);
    const { domain, network } = CHIPS[texts.chip];
    [field.node.placeholder, field.network.placeholder] = [english(domain), three(network / 1e9)];
    if (texts.for === "generate") showGenerate(readGenerate(texts)); else show(read(texts));
  });

  function showHeld(at, parts) {
    const all = sum(parts.map(([, size]) => size));
    part("held-bar").innerHTML = bar(parts, Math.max(all, at.chip.memory), "Of a device's memory");
    part("held").innerHTML = [
      ...parts.map((entry, i) => row(keyed(entry, i), english(entry[1]))),
      row("Total", english(all)),
      row("Memory of a device", english(at.chip.memory)),
    ].join("");
  }
  function showSent(sizes) {
    const [sentBar, rows] = Form.shares(sizes, 3, "Of the bytes sent");
    part("sent-bar").innerHTML = sentBar;
    part("kinds").innerHTML = rows;
  }
  const [BEST, WORST] = ["at best: all overlap", "at worst: communication exposed"];
  const timeRows = (spans, tokens) => Object.entries(spans).map(([name, span]) =>
    row(name, seconds(span), span ? three(tokens / span) : "no limit")).join("");

  function show(at) {
    part("answer").textContent = answer(at);

    const { frozen, weight, gradient, state, gathered, activations, layer, logits } = held(at);
    showHeld(at, [...(at.rank ? [["Frozen weights", frozen, 0], ["Adapters", weight, 4]]
      : [["Weights", weight, 0]]), ["Gradients", gradient, 2], ["Optimizer state", state, 1],
      ["Gathered weights", gathered, 3], ["Activations", activations, 5],
      ["Current layer", layer, 6], ["Logits and gradient", logits, 7]]);
    showSent(sent(at));
    part("times").innerHTML = timeRows({ ...times(at), [BEST]: leastSeconds(at),
      [WORST]: mostSeconds(at) }, at.tokens);
    const flops = allFlops(at);
    const { microbatches, ticks } = pipeline(at);
    part("weights").textContent = `The model has ${english(weights(at))} weights, and every token`
      + ` is multiplied with ${english(multiplied(at))} of them.${at.rank ? adapted(at) : ""}`
      + ` Attention scores are ${percent(attentionFlops(at), flops)} of the FLOPs, and`
      + ` recomputation ${percent(againFlops(at), flops)}.`
      + (at.pipe > 1 ? ` With ${english(microbatches)} microbatches the pipeline bubble is`
        + ` ${percent(at.pipe - 1, ticks)}.` : "");
    showLayouts(at);
  }

  function adapted(at) {
    return ` Frozen, they take ${bytes(storedBytes(at))}. The adapters have`
      + ` ${english(adapters({ ...at, model: 1 }))} weights, ${english(adapters(at) / at.pipe)} of`
      + ` them on each device.`;
  }

  /* The list of layouts, the first fifty and the one above; a click selects one. */
  let listed = [];
  function showLayouts(at) {
    const isOwn = ({ layout }) => AXES.every((axis) => layout[axis] === at[axis]);
    const all = layouts(at);
    const fitting = all.filter(({ holds }) => holds <= at.chip.memory).length;
    part("fitting").textContent = all.length ? `These sizes allow ${english(all.length)}`
      + ` layouts of ${english(at.devices)} devices; ${english(fitting)} fit in memory, and the one`
      + ` above is number ${english(all.findIndex(isOwn) + 1)}.`
      : `Layouts are listed for at most ${english(MOST_LISTED)} devices.`;
    listed = all.map((entry, i) => [i, entry]).filter(([i, entry]) => i < 50 || isOwn(entry));
    part("ranking").innerHTML = listed.map(([i, entry], n) => {
      const sizes = AXES.filter((axis) => entry.layout[axis] > 1);
      const name = sizes.map((axis) => `${axis} ${entry.layout[axis]}`).join(", ") || "one device";
      return `<tr data-row="${n}" ${isOwn(entry) ? 'aria-current="true"' : ""}><td>${i + 1}</td>
        <th scope="row"><button type="button">${name}</button></th><td>${bytes(entry.holds)}</td>
        <td>${entry.holds <= at.chip.memory ? "yes" : "no"}</td>
        <td>${seconds(entry.best)}</td><td>${seconds(entry.worst)}</td></tr>`;
    }).join("");
  }
  part("ranking").addEventListener("click", ({ target }) => {
    const { layout } = listed[target.closest("tr").dataset.row][1];
    take(Object.fromEntries(AXES.map((axis) => [axis, layout[axis]])));
    part("ranking").querySelector("[aria-current] button").focus({ preventScroll: true });
  });

  function showGenerate(at) {
    const [step, first] = [decodeTimes, prefillTimes].map((count) =>
      [leastSeconds(at, count), mostSeconds(at, count)]);
    part("answer").textContent = answerGenerate(at, step, first);
    const { weight, cache, logits } = heldToGenerate(at);
    showHeld(at, [["Weights", weight, 0], ["KV cache", cache, 5], ["Logits", logits, 7]]);
    showSent(sentToGenerate(at));
    const { compute, communication } = decodeTimes(at);
    part("times").innerHTML = timeRows({ compute, communication,
      "memory: weights": readWeights(at) / at.chip.memoryBandwidth,
      "memory: KV cache": readCache(at) / at.chip.memoryBandwidth,
      [BEST]: step[0], [WORST]: step[1] }, at.rows * at.data)
      + timeRows({ "a prompt, at best": first[0], "a prompt, at worst": first[1] }, at.prompt);
    const critical = criticalRows(at);
    part("weights").textContent = `The model has ${english(weights(at))} weights, and a step reads`
      + ` ${bytes(readWeights(at))} of them on each device. The KV cache of a sequence of length`
      + ` ${english(at.positions)} takes ${bytes(rowBytes(at))}, and a device reads`
      + ` ${bytes(readCache(at))} of all caches.`
      + (critical < Infinity ? ` Compute takes longer than memory above ${three(critical)} sequences`
        + ` per replica; here there are ${english(at.rows)}.` : " At this cache length memory takes"
        + " longer than compute for every batch size.");
  }

  for (const [name, options] of Object.entries({ cache: CACHES, chip: CHIPS, recipe: RECIPES,
    base: BASES })) for (const option of Object.keys(options)) field[name].add(new Option(option));
  start();
})();
