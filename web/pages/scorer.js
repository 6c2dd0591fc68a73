// What the search lists first: a term of the glossary, where it is the word that was looked for; then Sphinx's own order.
var Scorer = {
  score: ([docname, title, anchor, descr, score]) => {
    const looked = new URLSearchParams(location.search).get("q") ?? "";
    return docname === "glossary" && anchor && title.toLowerCase().endsWith(`> ${looked.trim().toLowerCase()}`) ? score + 50 : score;
  },
  // Sphinx's own numbers, which it wants to be given with it.
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
