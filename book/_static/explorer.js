/* The sharding explorer: shows which device of a mesh has which block of an array.
   Sharding.parse and Sharding.layout work without a page. */
"use strict";
(() => {
  const { COLORS, product, check } = Form;
  const BYTES = { float32: 4, bfloat16: 2, float16: 2, int32: 4, int8: 1, bool: 1 };
  const MAX_DEVICES = 64;
  const MIN_TILE = 16; // minimum width and height of one device's part of a drawing

  const range = (n) => [...Array(n).keys()];
  const quoted = (words) => words.map((word) => `"${word}"`);
  const listed = (words) => words.join(", ").replace(/, (?=[^,]*$)/, " and ");
  const repeated = (words) => words.find((word, i) => words.indexOf(word) < i);

  /* Parse the texts of the fields into [shape, mesh, spec]: sizes, [name, size] pairs, and a
     list of axis names for each entry. Throw an Error whose `field` names the input. */
  function parse(texts) {
    const parts = (text) =>
      text.replace(/^[\s({[]+|[\s)}\],]+$/g, "").split(",").map((part) => part.trim());
    const sizes = parts(texts.shape);
    const shape = (sizes.join() ? sizes : []).map((part) => {
      check(!/^0\d\d$/.test(part), "shape",
        `"${part}" is not a size, because commas separate sizes. Enter 4096 or 4_096.`);
      check(/^\d+(_\d{3})*$/.test(part), "shape",
        `Cannot read "${part}" as a size. Enter whole numbers, such as 8, 8.`);
      return Number(part.replaceAll("_", ""));
    });
    const mesh = parts(texts.mesh).map((part) => {
      const axis = part.match(/^["']?([\p{L}\p{N}_]+)["']?\s*[=:]\s*(\d+)$/u);
      check(axis, "mesh", `Cannot read "${part}" as a mesh axis. Enter axes as in x=2, y=4.`);
      return [axis[1], Number(axis[2])];
    });
    return [shape, mesh, parseSpec(texts.spec)];
  }

  /* Parse a spec by converting Python to JSON. Quotes and P( ) are optional; from a
     NamedSharding, as code or as printed, take the spec. */
  function parseSpec(pasted) {
    const sharding = /^[\w.]*NamedSharding\(.*?\b((?:P|PartitionSpec)\((?:[^()]|\([^()]*\))*\))/s;
    const text = pasted.trim().match(sharding)?.[1] ?? pasted;
    check(!/\bUNCONSTRAINED\b/.test(text), "spec", "UNCONSTRAINED leaves a dimension to the",
      "partitioner, in with_sharding_constraint. Enter an axis, or None.");
    check(!/\b(?:un)?reduced\s*=/.test(text), "spec", "This page shows blocks, not partial sums.",
      "Leave out unreduced= or reduced=.");
    const token = /"[^"]*"|'[^']*'|[^\s"'(),[\]]+|\S/g;
    const marks = { "(": "[", ")": "]", "[": "[", "]": "]", ",": ",", None: "null" };
    const json = (text.trim().replace(/^[\w.]+(?=\()/, "").match(token) ?? [])
      .map((word) => marks[word] ?? JSON.stringify(word.replace(/^(["'])(.*)\1$/, "$2")))
      .join("").replace(/(?<=[^[,]),(?=]|$)/g, "");
    let entries;
    try {
      entries = JSON.parse(`[${json}]`);
    } catch {
      check(false, "spec", 'Cannot read this spec. Enter it as in Python: P("x", None).');
    }
    if (entries.length === 1 && Array.isArray(entries[0])) [entries] = entries;
    const spec = entries.map((entry) => (entry === null ? [] : [entry].flat()));
    check(spec.flat().every((name) => typeof name === "string"), "spec",
      "A tuple inside a spec contains names of mesh axes only.");
    return spec;
  }

  /* Return the block of each device, numbered row by row over the mesh. Throw an Error where
     JAX raises one. `pieces` is the number of blocks along each dimension, `copies` the number
     of devices with the same block, and `piece` the position of a device's block. */
  function layout(shape, mesh, spec) {
    const names = mesh.map(([name]) => name);
    const sizes = mesh.map(([, size]) => size);
    const along = (name) => sizes[names.indexOf(name)];
    const used = spec.flat();
    const early = "JAX rejects this in NamedSharding(mesh, spec).";
    const late = "JAX rejects this when it places the array, in device_put.";

    const duplicate = repeated(names);
    check(!duplicate, "mesh", `Two axes of the mesh are named "${duplicate}".`,
      "Use different names.");
    check(!sizes.includes(0), "mesh", "An axis of the mesh needs at least one device.");
    check(product(sizes) <= MAX_DEVICES, "mesh",
      `The mesh has ${product(sizes)} devices; this page shows at most ${MAX_DEVICES}.`);
    const unknown = used.find((name) => !names.includes(name));
    check(unknown === undefined, "spec",
      `The mesh has no axis "${unknown}". It has ${listed(quoted(names))}.`,
      `Use one of these, or add "${unknown}" to the mesh.`, early);
    const twice = repeated(used);
    check(!twice, "spec", `The spec names the axis "${twice}" twice. Remove one.`, early);
    check(spec.length <= shape.length, "spec",
      `The spec has more entries (${spec.length}) than the array dimensions (${shape.length}).`, late);
    const entries = shape.map((_, d) => spec[d] ?? []);
    const pieces = entries.map((axes) => product(axes.map(along)));
    shape.forEach((size, d) => check(size % pieces[d] === 0, "shape",
      `Dimension ${d} of size ${size} does not divide over the ${pieces[d]} devices along`,
      `${listed(quoted(entries[d]))}. Pad it to ${Math.ceil(size / pieces[d]) * pieces[d]},`,
      "or shard it over fewer.", late));
    check(Number.isSafeInteger(product(shape) * MAX_DEVICES * 4), "shape",
      "The array has more elements than this page can count.");

    const block = shape.map((size, d) => size / pieces[d]);
    const devices = range(product(sizes)).map((id) => {
      const place = sizes.map((size, i) => Math.floor(id / product(sizes.slice(i + 1))) % size);
      const piece = entries.map((axes) =>
        axes.reduce((digits, name) => digits * along(name) + place[names.indexOf(name)], 0));
      return { id, place, piece, index: piece.map((n, d) => [n * block[d], (n + 1) * block[d]]) };
    });
    const replicated = names.filter((name) => along(name) > 1 && !used.includes(name));
    const copies = devices.length / product(pieces);
    return { shape, names, sizes, entries, pieces, block, copies, replicated, devices };
  }

  globalThis.Sharding = { parse, layout };
  const root = document.querySelector("#explorer");
  if (!root) return;

  /* Texts. Those inserted as HTML contain only numbers, and names of axes, which are letters. */
  const tuple = (items) => `(${items.join(", ")}${items.length === 1 ? "," : ""})`;
  const entry = (axes) => (axes.length > 1 ? tuple(quoted(axes)) : quoted(axes)[0] ?? "None");
  const written = (spec) => `P(${spec.map(entry).join(", ")})`;
  const by = (sizes) => sizes.join(" × ") || "one element";
  const position = ({ names }, { place }) =>
    names.map((name, i) => `${name}=${place[i]}`).join(", ");
  const slices = ({ pieces }, { index }) =>
    `[${index.map((ends, d) => (pieces[d] === 1 ? ":" : ends.join(":"))).join(", ")}]`;

  function bytes(n) {
    const power = n < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(n) / 10));
    const short = power ? ` (${+(n / 1024 ** power).toFixed(1)} ${" KMGT"[power]}iB)` : "";
    return `${n.toLocaleString("en")} byte${n === 1 ? "" : "s"}${short}`;
  }

  function answer({ shape, block, devices, copies, replicated }, size) {
    const n = devices.length;
    const each = n === 1 ? "The one device has" : `Each of ${n} devices has`;
    const [what, it] = copies === n ? ["the full array of", "It is"]
      : ["a block of", `Each block is on ${copies} devices,`];
    const full = product(shape) * size;
    return `${each} ${what} ${by(block)}: ${bytes(full * copies / n)}. `
      + (copies === 1
        ? `Nothing is replicated: all devices together need ${bytes(full)}.`
        : `${it} replicated over ${listed(replicated)}: all devices together need`
          + ` ${copies} times the array, ${bytes(copies * full)}.`);
  }

  const python = ({ shape, names, sizes }, spec, dtype) => `import jax

auto = jax.sharding.AxisType.Auto
mesh = jax.make_mesh(${tuple(sizes)}, ${tuple(quoted(names))}, axis_types=(auto,) * ${names.length})
sharding = jax.NamedSharding(mesh, jax.${written(spec)})
x = jax.numpy.zeros(${tuple(shape)}, "${dtype}", device=sharding)`;

  /* Return an SVG of two dimensions, sharded ones first, with a panel for each block of the
     other dimensions. A tile is a block, divided evenly among the devices that have it. */
  function draw({ shape, pieces, block, copies, devices }, minWidth, labels, altText) {
    const order = range(shape.length).reverse().sort((a, b) => (pieces[b] > 1) - (pieces[a] > 1));
    const [col, row] = order.slice(0, 2).sort((a, b) => b - a); // undefined below rank 2
    const rest = order.slice(2).filter((d) => pieces[d] > 1).reverse();
    const [columns, rows] = [pieces[col] ?? 1, pieces[row] ?? 1];
    const span = (d, n) => (block[d] > 1 ? `${n * block[d]}:${(n + 1) * block[d]}` : `${n}`);
    const room = (d) => (d === undefined ? 0 : 7 * span(d, pieces[d] - 1).length);
    const grouped = (members, dims) =>
      [...Map.groupBy(members, ({ piece }) => `${dims.map((d) => piece[d])}`).values()];

    const ratio = Math.min(1, Math.max(0.5, shape[row] / shape[col] || 0));
    const w = Math.max(minWidth / columns, MIN_TILE);
    const across = range(copies + 1).findLast((n) => copies % n === 0 && n * MIN_TILE <= w);
    const lines = copies / across;
    const h = Math.max(minWidth * ratio / rows, lines * MIN_TILE);
    const [width, height] = [columns * w, rows * h];
    const [left, top] = [row === undefined ? 1 : 20 + room(row), rest.length ? 56 : 36];
    const text = (x, y, words, more = "") => `<text x="${x}" y="${y}" ${more}>${words}</text>`;
    const rect = (x, y, wide, high, more) =>
      `<rect x="${x}" y="${y}" width="${wide}" height="${high}" ${more}/>`;

    const tile = (holders) => {
      const { piece } = holders[0];
      const [x, y] = [left + (piece[col] ?? 0) * w + 2, top + (piece[row] ?? 0) * h + 2];
      const [wide, high] = [(w - 4) / across, (h - 4) / lines];
      const shares = holders.map(({ id }, i) => {
        const [a, b] = [x + (i % across) * wide, y + Math.floor(i / across) * high];
        return `<g data-device="${id}">${rect(a, b, wide, high, `fill="${COLORS[id % 8]}"`)}
          ${text(a + wide / 2, b + high / 2, id, 'class="number"')}</g>`;
      });
      const edge = rect(x, y, w - 4, h - 4, 'class="edge"');
      return `<g class="block">${shares.join("")}${edge}</g>`;
    };
    const panel = (members, n) => {
      const where = rest.map((d) => `${labels[d]}: ${span(d, members[0].piece[d])}`).join(", ");
      const columnLabels = range(room(col) && room(col) < w ? columns : 0)
        .map((i) => text(left + (i + 0.5) * w, top - 8, span(col, i)));
      const rowLabels = range(room(row) && rows)
        .map((i) => text(left - 4, top + (i + 0.5) * h, span(row, i), 'class="row"'));
      return `<g transform="translate(0 ${n * (top + height + 12)})">
        ${text(left + width / 2, 8, where)}${text(left + width / 2, top - 26, labels[col] ?? "")}
        ${text(-top - height / 2, 8, labels[row] ?? "", 'transform="rotate(-90)"')}
        ${[...columnLabels, ...rowLabels, ...grouped(members, [row, col]).map(tile)].join("")}</g>`;
    };
    const panels = grouped(devices, rest).map(panel);
    const scrolls = width > minWidth ? `style="min-width: ${left + width}px" tabindex="0"` : "";
    return `<svg viewBox="0 0 ${left + width} ${panels.length * (top + height + 12)}" ${scrolls}
      role="img" aria-label="${altText}">${panels.join("")}</svg>`;
  }

  /* The page. Its state is the four fields, which the address stores without quotes. */
  const readable = (texts) => { try { return parse(texts); } catch { return [[], [], []]; } };
  let shown; // the last valid layout
  const { part, form, field, typed, take, start } =
    Form.connect(root, ["shape", "mesh", "spec", "dtype"], ["dtype"], (texts) => {
      const [shape, mesh, spec] = parse(texts);
      shown = layout(shape, mesh, spec);
      const grid = layout(shown.sizes, mesh, mesh.map(([name]) => [name])); // of single devices
      show(grid, spec, texts.dtype);
    }, asPython);

  function show(grid, spec, dtype) {
    const { shape, names, sizes, entries, block, copies, devices } = shown;
    part("answer").textContent = answer(shown, BYTES[dtype]);
    part("code").textContent = python(shown, spec, dtype);
    part("mesh").innerHTML = draw(grid, 120, names,
      `Mesh of ${by(sizes)} devices, numbered row by row`);
    part("array").innerHTML = draw(shown, 230,
      entries.map((axes, d) => `dimension ${d}${axes.length ? `, sharded over ${axes.join(", ")}` : ""}`),
      `Array of ${by(shape)} in blocks of ${by(block)}, each on ${copies} devices`);
    part("devices").innerHTML = devices.map((device) => `
      <tr data-device="${device.id}" tabindex="${device.id ? -1 : 0}">
        <th scope="row"><span style="background: ${COLORS[device.id % 8]}">${device.id}</span></th>
        <td>${position(shown, device)}</td><td>${slices(shown, device)}</td>
        <td>${tuple(block)}</td>
      </tr>`).join("");
    select();
  }

  function select(id) {
    for (const element of root.querySelectorAll("[data-device]")) {
      element.classList.toggle("on", element.dataset.device === id);
    }
    const device = shown?.devices[id];
    const others = device && shown.devices.filter((other) =>
      other !== device && `${other.piece}` === `${device.piece}`);
    part("held").textContent = !device ? "Point at a device, or select one in the table."
      : `Device ${id} at ${position(shown, device)} has ${slices(shown, device)}. `
        + (others.length ? `Copies on ${listed(others.map((other) => other.id))}.` : "No copies.");
  }

  /* Return the fields of an address in Python notation. */
  function asPython(texts) {
    const [shape, mesh, spec] = readable(texts);
    return mesh.length ? { shape: shape.join(", "), spec: written(spec),
      mesh: mesh.map((axis) => axis.join("=")).join(", ") } : {};
  }

  form.addEventListener("click", ({ target: { dataset } }) => {
    if (!dataset.spec) return;
    let [shape, mesh] = readable({ ...typed(), spec: "" });
    if (shape.length < 2 || mesh.length < 2) {
      form.reset();
      [shape, mesh] = readable(typed());
    }
    take({ spec: dataset.spec.replace(/\d/g, (i) => `"${mesh[i][0]}"`) });
  });
  for (const kind of ["pointermove", "pointerdown", "focusin"]) {
    root.addEventListener(kind, ({ target }) =>
      select(target.closest("[data-device]")?.dataset.device));
  }
  root.addEventListener("keydown", (event) => {
    const side = { ArrowUp: "previousElementSibling", ArrowDown: "nextElementSibling" }[event.key];
    const next = event.target.matches("tr") && event.target[side];
    if (!next) return;
    event.preventDefault();
    [event.target.tabIndex, next.tabIndex] = [-1, 0];
    next.focus();
  });
  start();
})();
