/* The search page. It takes words, or a traceback as it was printed: what belongs to one
   run of a program is dropped, its message counts most, and pages are ranked by the best
   passage that they have, by BM25 and by what its headings share with the query. Only
   Search.connect needs a page. */
"use strict";
const Search = (() => {
  const NOISE = [
    /https?:\/\/\S+/g,
    /(?<![\w.)])(?:[A-Za-z]:|~|\.{1,2})?[\\/](?:[^\s"'(),:\\/]+[\\/])*[^\s"'(),:\\/]+/g, // /a/path
    /[\w.~+-]+(?:[\\/][\w.+-]+)*\.(?:py|ipynb|cc|cpp|h|so)\b/g, // a/path.py
    /\bline \d+(?:, in [\w.<>]+)?|\bin <[^>]*>|\b0x[0-9a-f]+|\bv?\d+(?:\.\w+){2,}/g, // places, versions
    /\b(?:[a-z]+\d*|key<fry>)\[[\d,@\w]*\](?:\{[^}]*\})?/g, // a shape
    /Traceback \(most recent call last\)|\[\.\.\. skipping [^\]]*\]|The preceding stack trace[^.]*\./g,
    /For simplicity, JAX has removed[^.]*\.(?: Set JAX_TRACEBACK_FILTERING[^.]*\.)?/g,
    /(?:During handling of the above|The above) exception[^:]*:?/g,
  ];
  const COLOURS = /\x1b\[[\d;]*m/g; // of a terminal
  const PARTS = /(?=\b[\w.]*(?:Error|Exception|Warning)\b:)|(?=Traceback \()|(?=\bFile\b ["/~\w.<])/;
  const MESSAGE = /^[\w.]*(?:Error|Exception|Warning)\b/;
  const PLAIN = new Set(`a about after all also am an and any are as at be been being but by can could
    did do does doing for from get got had has have he how i if in into is it its just like may me
    more most my no not of on or our please see should so some someone such than that the their them
    then there these they this those though to too try trying until up us use used using very want
    was way we were what when where which while who why will with within without would you your`
    .split(/\s+/));
  const ANNOUNCES = /^book\/(?:index|status|references|glossary|running|field)\.html/;
  const OPENS = /^(?:What you will learn|Setup|Recap|Next)$/;
  const SHARE = { announcing: 0.6, opening: 0.8, besideMessage: 0.25, part: 0.25, name: 1.5 };
  const [K1, B, HEADING, TITLE] = [1.2, 0.5, 2, 0.25];

  const stem = (word) => (word.length > 4 ? word.replace(/(?:ings?|ed|es|s|e|ions?|ly)$/, "") : word);
  const counts = (word) => word.length > 1 && !/^\d+$/.test(word) && !PLAIN.has(word);
  const namesIn = (text) => [...text.matchAll(/[\p{L}\p{N}_]+/gu)].flat();
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

  /* The stems of a name, each with its weight: of the whole, and of its parts if it has any. */
  function stems(name) {
    const parts = name.split(/_+|(?<=[a-z])(?=[A-Z])/).map((part) => part.toLowerCase());
    const whole = [name.toLowerCase(), name.includes("_") ? SHARE.name : 1];
    const weighed = parts.length > 1 ? [whole, ...parts.map((part) => [part, SHARE.part])] : [whole];
    return weighed.filter(([word]) => counts(word)).map(([word, weight]) => [stem(word), weight]);
  }

  const stemsIn = (text) => namesIn(text).flatMap((name) => stems(name).map(([word]) => word));

  /* The weight of each stem of a query. Beside an error's message, the rest counts little. */
  function weigh(query) {
    const parts = query.replace(COLOURS, "").split(PARTS);
    const hasMessage = parts.some((part) => MESSAGE.test(part));
    const weights = new Map();
    for (const part of parts) {
      const bare = NOISE.reduce((text, noise) => text.replace(noise, " "), part);
      const share = hasMessage && !MESSAGE.test(part) ? SHARE.besideMessage : 1;
      for (const [word, weight] of namesIn(bare).flatMap(stems))
        weights.set(word, Math.max(share * weight, weights.get(word) ?? 0));
    }
    return weights;
  }

  /* All passages of {page: [[anchor, heading, passages], ...]}, and how rare each stem is. */
  function index(pages) {
    const all = [];
    const holders = new Map();
    const count = (counter, word) => counter.set(word, (counter.get(word) ?? 0) + 1);
    for (const [page, sections] of Object.entries(pages))
      for (const [anchor, heading, passages] of sections) {
        const title = sections[0][1];
        const [inHeading, inTitle] = [heading, title].map((text) => [...new Set(stemsIn(text))]);
        const share = (ANNOUNCES.test(page) ? SHARE.announcing : 1)
          * (OPENS.test(heading) || heading === title ? SHARE.opening : 1);
        for (const passage of passages) {
          const [found, times] = [stemsIn(passage), new Map()];
          for (const word of found) count(times, word);
          for (const word of new Set([...inHeading, ...found])) count(holders, word);
          all.push({ page, title, anchor, heading, passage, share, times, length: found.length,
            inHeading, inTitle });
        }
      }
    const mean = sum(all.map(({ length }) => length)) / all.length;
    const rarity = (word) => Math.log(1 + all.length / (holders.get(word) ?? all.length));
    return { all, mean, rarity };
  }

  function score({ mean, rarity }, weights, { times, length, share, inHeading, inTitle }) {
    const damping = K1 * (1 - B + B * length / mean);
    const text = sum([...weights].map(([word, weight]) => {
      const n = times.get(word) ?? 0;
      return weight * rarity(word) * n * (K1 + 1) / (n + damping);
    }));
    const likeness = (words) => sum(words.map((word) => (weights.get(word) ?? 0) * rarity(word))) ** 2
      / (sum(words.map(rarity)) || 1);
    return share * text + HEADING * likeness(inHeading) + TITLE * likeness(inTitle);
  }

  /* The ten best pages for a query, best first, each as its sections, best first. */
  function rank(found, query) {
    const weights = weigh(query);
    const rated = found.all.map((item) => ({ ...item, score: score(found, weights, item) }))
      .filter(({ score }) => score > 0).sort((a, b) => b.score - a.score);
    const pages = new Map();
    for (const item of rated) {
      const sections = pages.get(item.page) ?? [];
      pages.set(item.page, sections);
      if (!sections.some(({ anchor }) => anchor === item.anchor)) sections.push(item);
    }
    return [...pages.values()].slice(0, 10);
  }

  /* The sentence or line of a passage that says most of a query: [piece, whether it is in it]. */
  function quote({ rarity }, weights, passage) {
    const worth = (text) => sum([...new Set(stemsIn(text))]
      .map((word) => (weights.get(word) ?? 0) * rarity(word)));
    const best = passage.split(/\n|(?<=[.!?])\s+(?=[\p{Lu}"'“‘`(])/u)
      .reduce((a, b) => (worth(b) > worth(a) ? b : a));
    return best.split(/([\p{L}\p{N}_]+)/u)
      .map((piece) => [piece, stems(piece).some(([word]) => weights.has(word))]);
  }

  function element(kind, properties, ...children) {
    const made = Object.assign(document.createElement(kind), properties);
    made.append(...children);
    return made;
  }

  /* A result: its best section, the page, what matched, and sections about as good. */
  function describe(found, weights, [best, ...others]) {
    const link = ({ page, anchor, heading }) => element("a", { href: `${page}#${anchor}` }, heading);
    const quoted = quote(found, weights, best.passage)
      .map(([piece, matches]) => (matches ? element("mark", {}, piece) : piece));
    const item = element("li", {}, link(best), element("p", { className: "where" }, best.title),
      element("p", { className: "quote" }, ...quoted));
    const near = others.filter(({ score }) => score > 0.7 * best.score).slice(0, 2);
    const links = near.flatMap((other) => [" · ", link(other)]).slice(1);
    if (near.length) item.append(element("p", { className: "near" }, "Also there: ", ...links));
    return item;
  }

  async function load(address) {
    const { body } = await fetch(address);
    return index(await new Response(body.pipeThrough(new DecompressionStream("gzip"))).json());
  }

  /* Answers what is in the form's field now, and whenever it changes. */
  async function connect(form, list, address) {
    const [field, status] = [form.elements.q, form.querySelector("[role=status]")];
    let found, waiting;
    function answer() {
      const query = field.value;
      const results = rank(found, query).map((sections) => describe(found, weigh(query), sections));
      list.replaceChildren(...results);
      status.textContent = results.length ? `Found ${results.length} pages, best first.`
        : query.trim() ? "Found nothing. Paste the whole message, or try fewer and plainer words: "
          + "a function’s name, or what you want to do." : "";
      const kept = query.trim() ? `?q=${encodeURIComponent(query.slice(0, 2000))}` : location.pathname;
      history.replaceState(null, "", kept);
    }
    field.value = new URLSearchParams(location.search).get("q") ?? "";
    field.focus();
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey) event.preventDefault(); // it is answered already
    });
    status.textContent = "Reading the book …";
    found = await load(address).catch(() => {
      status.textContent = "The search could not read its list of sections. Load the page again.";
    });
    if (!found) return;
    answer();
    field.addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(answer, 150);
    });
  }
  return { load, rank, connect };
})();
