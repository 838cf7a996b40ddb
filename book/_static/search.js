/* Sphinx's search wants every word on one page, so an error message pasted from a
   terminal, with its shapes and paths, finds nothing. Here each word counts by how rare
   it is, a section whose heading is in the query goes before the pages, and where
   nothing else decides, the page that comes first. */
const parse = Search._parseQuery;
Search._parseQuery = (query) => {
  // A path in a traceback says where the reader keeps things, and names no cure.
  const path = /(?<![\w.])(?:[A-Za-z]:|~)?[\\/](?:[^\s"'(),:\\/]+[\\/])+[^\s"'(),:\\/]*/g;
  const bare = query.replace(path, " ");
  return parse(bare.trim() ? bare : query);
};

Search.performTermsSearch = (query, excluded) => {
  const { terms, titleterms, titles, alltitles, docnames, filenames } = Search._index;
  const stemmer = new Stemmer();
  const listed = (index, word) => [Object.hasOwn(index, word) ? index[word] : []].flat();
  const pagesWith = (word) => {
    let pages = [...listed(terms, word), ...listed(titleterms, word)];
    if (!pages.length && word.length > 2)
      pages = Object.keys(terms).filter((term) => term.includes(word)).flatMap((term) => listed(terms, term));
    return new Set(pages);
  };
  const weigh = (words) =>
    words.map((word) => pagesWith(word).size).filter(Boolean)
      .reduce((sum, size) => sum + Math.log(1 + docnames.length / size), 0);
  const unwanted = new Set([...excluded].flatMap((word) => [...pagesWith(word)]));

  const results = [];
  const add = (page, title, anchor, score) => {
    const order = 0.01 * (1 - page / docnames.length);
    if (score > 0 && !unwanted.has(page))
      results.push([docnames[page], title, anchor, null, score + order, filenames[page]]);
  };
  const places = new Map([...query].map((word) => [word, pagesWith(word)]));
  docnames.forEach((_, page) => {
    const here = [...query].filter((word) => places.get(word).has(page));
    const named = here.filter((word) => listed(titleterms, word).includes(page));
    add(page, titles[page], "", weigh(here) + weigh(named));
  });
  for (const [title, sections] of Object.entries(alltitles)) {
    const words = splitQuery(title.toLowerCase()).map((word) => stemmer.stemWord(word));
    const shared = words.filter((word) => query.has(word));
    const share = weigh(shared) / weigh(words);
    if (shared.length > 1 && share > 0.7)
      for (const [page, id] of sections)
        add(page, id ? `${titles[page]} > ${title}` : title, id ? "#" + id : "", 6 * share * weigh(shared));
  }
  const best = Math.max(...results.map((result) => result[4]));
  return results.filter((result) => result[4] > best / 4);
};
