/* The search page: MiniSearch over the passages of the book, with what error messages and
   names of code need. Of a traceback, only the messages of its errors count, without what
   belongs to one run of a program. */
import MiniSearch from "./minisearch.js";

const NOISE = [
  /\x1b\[[\d;]*m/g, // colours of a terminal
  /https?:\/\/\S+/g,
  /(?<![\w.)])(?:[A-Za-z]:|~|\.{1,2})?[\\/](?:[^\s"'(),:\\/]+[\\/])*[^\s"'(),:\\/]+/g, // /a/path
  /[\w.~+-]+(?:[\\/][\w.+-]+)*\.(?:py|ipynb|cc|cpp|h|so)\b/g, // a/path.py
  /\bline \d+(?:, in [\w.<>]+)?|\bin <[^>]*>|\b0x[0-9a-f]+|\bv?\d+(?:\.\w+){2,}/g, // places, versions
  /\b(?:[a-z]+\d*|key<fry>)\[[\d,@\w]*\](?:\{[^}]*\})?/g, // a shape
  /Traceback \(most recent call last\)|\[\.\.\. skipping [^\]]*\]|The preceding stack trace[^.]*\./g,
  /For simplicity, JAX has removed[^.]*\.(?: Set JAX_TRACEBACK_FILTERING[^.]*\.)?/g,
  /(?:During handling of the above|The above) exception[^:]*:?/g,
];
const PARTS = /(?=\b[\w.]*(?:Error|Exception|Warning)\b:)|(?=\bFile ["/~\w.<])/;
const MESSAGE = /^[\w.]*(?:Error|Exception|Warning)\b/;
const STOP_WORDS = new Set(`error exception warning runtimeerror typeerror valueerror a about
  after all also am an and any are as at be been being but by can could did do does doing for from
  get got had has have he how i if in into is it its just like may me more most my no not of on or
  our please see should so some someone such than that the their them then there these they this
  those though to too try trying until up us use used using very want was way we were what when
  where which while who why will with within without would you your`.split(/\s+/));
const LISTS_OTHERS = /^book\/(?:index|status|references|glossary|running|field|teach|which_api)\.html/;
const OPENING = /^(?:What you will learn|Setup|Recap|Next)$/;
const FEW_TERMS = 12;
const TRY = "Paste the whole message, or try fewer and plainer words: a function’s name, or what you "
  + "want to do.";

const words = (text) => text.match(/[\p{L}\p{N}_]+/gu) ?? [];
const stem = (word) => (word.length > 4 ? word.replace(/(?:ings?|ed|es|s|e|ions?|ly)$/, "") : word);

/* The stem of a word and, for a name such as shard_map or NamedSharding, of each of its parts. */
function terms(word) {
  const parts = word.split(/_+|(?<=[a-z])(?=[A-Z])/);
  return [...new Set([word, ...parts].map((part) => part.toLowerCase()))]
    .filter((part) => part.length > 1 && !/^\d+$/.test(part) && !STOP_WORDS.has(part)).map(stem);
}

/* The weight of each term of a text. */
function weigh(text) {
  const weights = new Map();
  for (const word of words(text))
    for (const [i, term] of terms(word).entries()) {
      const weight = i > 0 ? 0.25 : word.includes("_") ? 1.5 : 1;
      weights.set(term, Math.max(weight, weights.get(term) ?? 0));
    }
  return weights;
}

/* The index of sections.bin: {page: [[anchor, heading, passages], ...]}, packed. */
export async function load(address) {
  const { body } = await fetch(address);
  const pages = await new Response(body.pipeThrough(new DecompressionStream("gzip"))).json();
  const fields = ["title", "heading", "passage"];
  const index = new MiniSearch({
    fields, tokenize: words, processTerm: terms, storeFields: [...fields, "page", "anchor"],
  });
  let id = 0;
  for (const [page, sections] of Object.entries(pages))
    for (const [anchor, heading, passages] of sections)
      for (const passage of passages)
        index.add({ id: id++, page, title: sections[0][1], anchor, heading, passage });
  return index;
}

/* The ten best pages, best first, each as the best passage of each of its sections; the weight
   of each term; and the words of a short query that the book does not have. */
export function search(index, query) {
  const parts = NOISE.reduce((text, noise) => text.replace(noise, " "), query).split(PARTS);
  const messages = parts.filter((part) => MESSAGE.test(part));
  const text = (messages.length ? messages : parts).join(" ");
  const weights = weigh(text);
  const isShort = !messages.length && weights.size <= FEW_TERMS;
  const found = index.search([...weights.keys()].join(" "), {
    tokenize: words,
    processTerm: (term) => term,
    boostTerm: (term) => weights.get(term),
    bm25: { k: 1.2, b: 0.5, d: 0.5 },
    fuzzy: (term) => isShort && term.length > 5 && 0.2,
    boost: { heading: 2, title: isShort ? 3 : 0.25 },
    boostDocument: (id, term, { page, heading, title }) =>
      (LISTS_OTHERS.test(page) ? 0.6 : 1) * (OPENING.test(heading) || heading === title ? 0.8 : 1),
  });
  const pages = [...new Set(found.map(({ page }) => page))].slice(0, 10).map((page) => {
    const passages = found.filter((passage) => passage.page === page);
    return passages.filter(({ anchor }, i) => passages.findIndex((other) => other.anchor === anchor) === i);
  });
  const known = new Set(found.flatMap((passage) => passage.terms));
  const unknown = (word) => terms(word).length > 0 && !terms(word).some((term) => known.has(term));
  return { pages, weights, missing: isShort ? words(text).filter(unknown) : [] };
}

/* The sentence or line of a passage with most of a query: [piece, whether it matches]. */
function quote({ passage, terms: matched }, weights) {
  const matches = (word) => terms(word).some((term) => matched.includes(term));
  const worth = (text) => [...new Set(words(text).flatMap(terms))]
    .filter((term) => matched.includes(term))
    .reduce((sum, term) => sum + (weights.get(term) ?? 1), 0);
  const best = passage.split(/\n|(?<=[.!?])\s+(?=[\p{Lu}"'“‘`(])/u)
    .reduce((a, b) => (worth(b) > worth(a) ? b : a));
  return best.split(/([\p{L}\p{N}_]+)/u).map((piece) => [piece, matches(piece)]);
}

function element(kind, properties, ...children) {
  const made = Object.assign(document.createElement(kind), properties);
  made.append(...children);
  return made;
}

/* A result: its best section, the page, what matched, and sections about as good. */
function describe([best, ...others], weights) {
  const link = ({ page, anchor, heading }) => element("a", { href: `${page}#${anchor}` }, heading);
  const quoted = quote(best, weights)
    .map(([piece, matches]) => (matches ? element("mark", {}, piece) : piece));
  const item = element("li", {}, link(best), element("p", { className: "where" }, best.title),
    element("p", { className: "quote" }, ...quoted));
  const near = others.filter(({ score }) => score > 0.7 * best.score).slice(0, 2);
  const links = near.flatMap((other) => [" · ", link(other)]).slice(1);
  if (near.length) item.append(element("p", { className: "near" }, "Also there: ", ...links));
  return item;
}

/* Answer what is in the form's field now, and whenever it changes. */
async function connect(form, list) {
  const [field, status] = [form.elements.q, form.querySelector("[role=status]")];
  let index, waiting;
  function answer() {
    const query = field.value.trim();
    const { pages, weights, missing } = search(index, query);
    list.replaceChildren(...pages.map((sections) => describe(sections, weights)));
    status.textContent = !query ? "" : !pages.length ? `Found nothing. ${TRY}`
      : missing.length ? `Found ${pages.length} pages, but nothing with “${missing.join("”, “")}”. ${TRY}`
        : `Found ${pages.length} pages, best first.`;
    history.replaceState(null, "", query ? `?q=${encodeURIComponent(query.slice(0, 2000))}` : location.pathname);
  }
  field.value = new URLSearchParams(location.search).get("q") ?? "";
  field.focus();
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) event.preventDefault(); // the answer is already there
  });
  status.textContent = "Reading the book …";
  index = await load("sections.bin").catch(() => {
    status.textContent = "The search could not read its list of sections. Load the page again.";
  });
  if (!index) return;
  answer();
  field.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(answer, 150);
  });
}

connect(document.querySelector("form.search"), document.querySelector("#search-results"));
