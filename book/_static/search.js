/* The search page. It takes words, or a traceback as it was printed: what belongs to one
   run of a program is dropped, its message counts most, and pages are ranked by the best
   passage that they have (BM25, with the words of headings besides). Only Search.connect
   needs a page. */
"use strict";
const Search = (() => {
  const NOISE = [
    /\x1b\[[\d;]*m/g, // a terminal's colours
    /https?:\/\/\S+/g,
    /(?<![\w.)])(?:[A-Za-z]:|~|\.{1,2})?[\\/](?:[^\s"'(),:\\/]+[\\/])*[^\s"'(),:\\/]+/g, // /a/path
    /[\w.~+-]+(?:[\\/][\w.+-]+)*\.(?:py|ipynb|cc|cpp|h|so)\b/g, // a/path.py
    /\bline \d+(?:, in [\w.<>]+)?|\bin <[^>]*>/g,
    /\b(?:[a-z]+\d*|key<fry>)\[[\d,@\w]*\](?:\{[^}]*\})?/g, // a shape
    /\b0x[0-9a-f]+\b/gi,
    /\bv?\d+\.\d+(?:\.\w+)*\b/g, // a version
    /\b[EFIW]?\d{4}[- ]?\d\d[-:]\d\d[T ]?[\d:.,]*/g, // a time
    /Traceback \(most recent call last\)|\[\.\.\. skipping [^\]]*\]/g,
    /(?:During handling of the above|The above) exception[^:]*:?/g,
    /For simplicity, JAX has removed[^.]*\.(?: Set JAX_TRACEBACK_FILTERING[^.]*\.)?/g,
    /The preceding stack trace is the source[^.]*\./g,
  ];
  const PARTS = /(?=\b[\w.]*(?:Error|Exception|Warning)\b:)|(?=Traceback \(most)|(?=\bFile\b ["/~\w.<])/;
  const MESSAGE = /^[\w.]*(?:Error|Exception|Warning)\b/;
  const PLAIN = new Set(("a about after all also am an and any are as at be been being but by can could did do does doing for "
    + "from get got had has have he how i if in into is it its just like may me more most my no not of on or our please see "
    + "should so some someone such than that the their them then there these they this those though to too try trying until "
    + "up us use used using very want was way we were what when where which while who why will with within without would you "
    + "your").split(" "));
  const ANNOUNCES = /^book\/(?:index|status|references|glossary|running)\.html/;
  const OPENING = /^(?:What you will learn|Setup|Recap|Next)$/;
  const [K1, B, PASSAGE] = [1.2, 0.5, 120]; // saturation, share of length; words
  const [HEADING, NAME, PART, CONTEXT, OPENS, TELLS] = [1.5, 1.5, 0.25, 0.25, 0.8, 0.6];
  const [PAGES, NEAR] = [10, 0.7];

  const stem = (word) => word.length > 4 ? word.replace(/(?:ings?|ed|es|s|e|ions?|ly)$/, "") : word;
  const counts = (word) => word.length > 1 && !/^\d+$/.test(word) && !PLAIN.has(word);
  const namesIn = (text) => text.matchAll(/[\p{L}\p{N}_]+/gu);

  /* The stems of a name, each with its weight: of the whole, and of its parts if it has any. */
  function stems(name) {
    const parts = name.split(/_+|(?<=[a-z])(?=[A-Z])/).map((part) => part.toLowerCase()).filter(counts);
    const whole = name.toLowerCase();
    const found = counts(whole) ? [[stem(whole), name.includes("_") ? NAME : 1]] : [];
    return parts.length > 1 ? [...found, ...parts.map((part) => [stem(part), PART])] : found;
  }

  const stemsIn = (text) => [...namesIn(text)].flatMap(([name]) => stems(name).map(([word]) => word));

  /* The weight of each stem of a query. Beside an error's message, the rest counts little. */
  function weigh(query) {
    const parts = query.split(PARTS);
    const hasMessage = parts.some((part) => MESSAGE.test(part));
    const weights = new Map();
    for (const part of parts) {
      const bare = NOISE.reduce((text, noise) => text.replace(noise, " "), part);
      const share = hasMessage && !MESSAGE.test(part) ? CONTEXT : 1;
      for (const [name] of namesIn(bare))
        for (const [word, weight] of stems(name))
          weights.set(word, Math.max(share * weight, weights.get(word) ?? 0));
    }
    return weights;
  }

  /* Lines of a text, together until they have about PASSAGE words. */
  function passages(text) {
    const found = [[]];
    let length = 0;
    for (const line of text.split("\n")) {
      const size = line.split(" ").length;
      if (length && length + size > PASSAGE) [length] = [0, found.push([])];
      found.at(-1).push(line);
      length += size;
    }
    return found.map((lines) => lines.join("\n"));
  }

  /* All passages of {page: [[anchor, heading, text], ...]}, and how rare each stem is. */
  function index(pages) {
    const all = [];
    for (const [page, sections] of Object.entries(pages))
      for (const [anchor, heading, text] of sections)
        for (const passage of passages(text)) {
          const found = stemsIn(passage);
          const times = new Map();
          for (const word of found) times.set(word, (times.get(word) ?? 0) + 1);
          const [title] = sections[0].slice(1);
          const lower = (ANNOUNCES.test(page) ? TELLS : 1) * (OPENING.test(heading) || heading === title ? OPENS : 1);
          all.push({ page, title, anchor, heading, passage, lower, times, length: found.length, named: new Set(stemsIn(heading)) });
        }
    const holders = new Map();
    for (const { named, times } of all)
      for (const word of new Set([...named, ...times.keys()])) holders.set(word, (holders.get(word) ?? 0) + 1);
    const mean = all.reduce((sum, { length }) => sum + length, 0) / all.length;
    return { all, mean, rarity: (word) => Math.log(1 + all.length / (holders.get(word) ?? all.length)) };
  }

  function score({ mean, rarity }, weights, { times, named, length, lower }) {
    let total = 0;
    for (const [word, weight] of weights) {
      const n = times.get(word);
      if (n) total += weight * rarity(word) * n * (K1 + 1) / (n + K1 * (1 - B + B * length / mean));
    }
    let [shared, heading] = [0, 1e-9];
    for (const word of named) {
      heading += rarity(word);
      shared += (weights.get(word) ?? 0) * rarity(word);
    }
    return lower * total + HEADING * shared ** 2 / heading;
  }

  /* The pages for a query, best first, each as its best sections. */
  function rank(found, query) {
    const weights = weigh(query);
    const pages = new Map();
    for (const item of found.all) {
      const rated = { ...item, score: score(found, weights, item) };
      const sections = pages.get(item.page) ?? new Map();
      if (rated.score > (sections.get(item.anchor)?.score ?? 0)) pages.set(item.page, sections.set(item.anchor, rated));
    }
    return [...pages.values()]
      .map((sections) => [...sections.values()].sort((a, b) => b.score - a.score))
      .sort(([a], [b]) => b.score - a.score)
      .slice(0, PAGES);
  }
  /* The sentence or line of a passage that says most of what a query asks, in pieces: [text, whether it matched]. */
  function quote({ rarity }, weights, passage) {
    const worth = (text) => [...new Set(stemsIn(text))].reduce((sum, word) => sum + (weights.get(word) ?? 0) * rarity(word), 0);
    const sentences = passage.split(/\n|(?<=[.!?])\s+(?=[\p{Lu}"'“‘`(])/u);
    const best = sentences.reduce((a, b) => (worth(b) > worth(a) ? b : a));
    return best.split(/([\p{L}\p{N}_]+)/u).map((piece) => [piece, stems(piece).some(([word]) => weights.has(word))]);
  }

  function element(kind, properties, ...children) {
    const made = Object.assign(document.createElement(kind), properties);
    made.append(...children);
    return made;
  }

  function describe(found, weights, [best, ...more]) {
    const link = ({ page, anchor, heading }) => element("a", { href: `${page}#${anchor}` }, heading);
    const pieces = quote(found, weights, best.passage).map(([text, hit]) => (hit ? element("mark", {}, text) : text));
    const item = element("li", {}, link(best), element("p", { className: "where" }, best.title), element("p", { className: "quote" }, ...pieces));
    const near = more.filter(({ score }) => score > NEAR * best.score).slice(0, 2);
    if (near.length) item.append(element("p", { className: "near" }, "Also there: ", ...near.flatMap((other, i) => [i ? " · " : "", link(other)])));
    return item;
  }

  async function load(address) {
    const packed = await fetch(address);
    return index(await new Response(packed.body.pipeThrough(new DecompressionStream("gzip"))).json());
  }

  /* Answers what is in the field now, and whenever it changes. */
  async function connect(form, address) {
    const field = form.elements.q;
    const [status, list] = [form.querySelector("[role=status]"), document.querySelector("#search-results")];
    field.value = new URLSearchParams(location.search).get("q") ?? "";
    field.focus();
    let found;
    const answer = () => {
      const weights = weigh(field.value);
      const pages = rank(found, field.value);
      list.replaceChildren(...pages.map((sections) => describe(found, weights, sections)));
      status.textContent = pages.length ? `Found ${pages.length} ${pages.length > 1 ? "pages" : "page"}, best first.`
        : !field.value.trim() ? ""
        : "Found nothing. Paste the whole message, or try fewer and plainer words: a function’s name, or what you want to do.";
      history.replaceState(null, "", field.value.trim() ? `?q=${encodeURIComponent(field.value.slice(0, 2000))}` : location.pathname);
    };
    form.addEventListener("submit", (event) => event.preventDefault());
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey) event.preventDefault();
    });
    status.textContent = "Reading the book …";
    try {
      found = await load(address);
    } catch {
      status.textContent = "The search could not read its list of sections. Load the page again.";
      return;
    }
    answer();
    let waiting;
    field.addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(answer, 150);
    });
  }
  return { load, rank, connect };
})();
