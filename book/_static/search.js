/* The search page. It takes words, or a traceback as it was printed: what belongs to one
   run of a program is dropped, its message counts most, and pages are ranked by the best
   passage that they have, by BM25 and by what its headings share with the query. A word that
   the book does not have stands for those that are spelled alike. Only Search.connect needs a
   page. */
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
  const OF_A_NAME = [ // what Python and JAX say of a name that is gone or wrong
    /(?:\b[Mm]odule )?['"`]?(?<of>[\w.]*)['"`]?(?: object)? has no attribute ['"`](?<name>\w+)['"`]/g,
    /(?<of>[\w.]*)(?:\(\))? got an unexpected keyword argument ['"`](?<name>\w+)['"`]/g,
    /cannot import name ['"`](?<name>\w+)['"`] from ['"`](?<of>[\w.]+)['"`](?: \([^)]*\))?/g,
    /No module named ['"`](?<of>[\w.]*?)(?<name>\w+)['"`]/g,
    /Unrecognized config option: (?<of>)(?<name>\w+)/g,
    /['"`]?(?<of>[\w.]*?)(?<name>\w+)['"`]? (?:is|has been) (?:now )?(?:deprecated|renamed)/g,
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
  const SHARE = { announcing: 0.6, opening: 0.8, besideMessage: 0.25, part: 0.25, name: 1.5,
    theName: 4, ofTheName: 0.5, alike: 0.7 };
  const [K1, B, HEADING] = [1.2, 0.5, 2];
  const [FEW, HALF] = [12, 0.45];
  const TITLE = { ofMessage: 0.25, ofWords: 3 };

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

  const bare = (name) => name.replaceAll("_", "");

  /* Whether one letter less, more or other, or two changed about, make one name of another. */
  function alike(a, b) {
    if (Math.abs(a.length - b.length) > 1) return false;
    let [start, end] = [0, 0];
    while (start < a.length && a[start] === b[start]) start++;
    while (end < Math.min(a.length, b.length) - start && a.at(-1 - end) === b.at(-1 - end)) end++;
    const [x, y] = [a, b].map((name) => name.slice(start, name.length - end));
    return (x.length < 2 && y.length < 2) || (x.length === 2 && x === y[1] + y[0]);
  }

  /* The stems for which a name may stand that the book does not have, each with its weight. */
  function guesses({ spelled, holders }, name) {
    const low = name.toLowerCase();
    if (low.length < 6 || spelled.has(low) || holders.has(stem(low))) return [];
    const same = [...spelled].filter(([other]) => bare(other) === bare(low));
    const near = same.length ? same : [...spelled].filter(([other]) => alike(low, other));
    return near.map(([other, word]) => [word, same.length ? SHARE.name : SHARE.alike]);
  }

  /* The weight of each stem of a query, and whether it has an error's message. Beside one the
     rest counts little, and in a message about a name, the name counts most. */
  function weigh(found, query) {
    const parts = query.replace(COLOURS, "").split(PARTS);
    const hasMessage = parts.some((part) => MESSAGE.test(part));
    const weights = new Map();
    const raise = (word, weight) => weights.set(word, Math.max(weight, weights.get(word) ?? 0));
    function add(text, share) {
      for (const name of namesIn(text)) {
        const near = share < 1 ? [] : guesses(found, name);
        for (const [word, weight] of near.length ? near : stems(name)) raise(word, share * weight);
      }
    }
    for (const part of parts) {
      const share = hasMessage && !MESSAGE.test(part) ? SHARE.besideMessage : 1;
      const others = OF_A_NAME.reduce((text, form) => text.replace(form, (...match) => {
        const { of, name } = match.at(-1);
        add(name, share * SHARE.theName);
        add(of, share * SHARE.ofTheName);
        return " ";
      }), part);
      add(NOISE.reduce((text, noise) => text.replace(noise, " "), others), share);
    }
    return { weights, hasMessage };
  }

  /* All passages of {page: [[anchor, heading, passages], ...]}, and how rare each stem is. */
  function index(pages) {
    const all = [];
    const [holders, spelled] = [new Map(), new Map()];
    const count = (counter, word) => counter.set(word, (counter.get(word) ?? 0) + 1);
    for (const [page, sections] of Object.entries(pages))
      for (const [anchor, heading, passages] of sections) {
        const title = sections[0][1];
        const [inHeading, inTitle] = [heading, title].map((text) => [...new Set(stemsIn(text))]);
        const share = (ANNOUNCES.test(page) ? SHARE.announcing : 1)
          * (OPENS.test(heading) || heading === title ? SHARE.opening : 1);
        for (const passage of passages) {
          const [found, times] = [stemsIn(passage), new Map()];
          for (const name of namesIn(passage)) spelled.set(name.toLowerCase(), stem(name.toLowerCase()));
          for (const word of found) count(times, word);
          for (const word of new Set([...inHeading, ...found])) count(holders, word);
          all.push({ page, title, anchor, heading, passage, share, times, length: found.length,
            inHeading, inTitle });
        }
      }
    const mean = sum(all.map(({ length }) => length)) / all.length;
    const rarity = (word) => Math.log(1 + all.length / (holders.get(word) ?? all.length));
    return { all, mean, rarity, holders, spelled };
  }

  function score({ mean, rarity }, { weights, hasMessage }, { times, length, share, inHeading, inTitle }) {
    const damping = K1 * (1 - B + B * length / mean);
    const text = sum([...weights].map(([word, weight]) => {
      const n = times.get(word) ?? 0;
      return weight * rarity(word) * n * (K1 + 1) / (n + damping);
    }));
    const likeness = (words) => sum(words.map((word) => (weights.get(word) ?? 0) * rarity(word))) ** 2
      / (sum(words.map(rarity)) || 1);
    const title = hasMessage || weights.size > FEW ? TITLE.ofMessage : TITLE.ofWords;
    return share * text + HEADING * likeness(inHeading) + share * title * likeness(inTitle);
  }

  /* The ten best pages for a query, best first, each as its sections, best first. */
  function rank(found, query) {
    const asked = weigh(found, query);
    const rated = found.all.map((item) => ({ ...item, score: score(found, asked, item) }))
      .filter(({ score }) => score > 0).sort((a, b) => b.score - a.score);
    const pages = new Map();
    for (const item of rated) {
      const sections = pages.get(item.page) ?? [];
      pages.set(item.page, sections);
      if (!sections.some(({ anchor }) => anchor === item.anchor)) sections.push(item);
    }
    return [...pages.values()].slice(0, 10);
  }

  /* Whether a few words were asked of which even the best page has less than half, by rarity.
     A word that the book lacks counts as the rarest. */
  function isWeak(found, query) {
    const { weights, hasMessage } = weigh(found, query);
    const [best] = rank(found, query);
    if (!best || hasMessage || weights.size > FEW) return !best;
    const items = found.all.filter(({ page }) => page === best[0].page);
    const has = (word) => items.some(({ times, inHeading, inTitle }) =>
      times.has(word) || inHeading.includes(word) || inTitle.includes(word));
    const rarest = Math.log(1 + found.all.length);
    const worth = ([word, weight]) => weight * (found.holders.has(word) ? found.rarity(word) : rarest);
    return sum([...weights].filter(([word]) => has(word)).map(worth)) < HALF * sum([...weights].map(worth));
  }

  /* The sentence or line of a passage that says most of a query: [piece, whether it is in it]. */
  function quote({ rarity }, { weights }, passage) {
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
  function describe(found, asked, [best, ...others]) {
    const link = ({ page, anchor, heading }) => element("a", { href: `${page}#${anchor}` }, heading);
    const quoted = quote(found, asked, best.passage)
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
      const asked = weigh(found, query);
      const pages = rank(found, query);
      list.replaceChildren(...pages.map((sections) => describe(found, asked, sections)));
      const tryThis = "Paste the whole message, or try fewer and plainer words: a function’s name, "
        + "or what you want to do.";
      status.textContent = !query.trim() ? "" : !pages.length ? `Found nothing. ${tryThis}`
        : isWeak(found, query) ? `Found ${pages.length} pages, but probably not what you look for. ${tryThis}`
          : `Found ${pages.length} pages, best first.`;
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
  return { load, rank, isWeak, connect };
})();
