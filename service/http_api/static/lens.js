/** The logit lens: what the model would say after a token, if it ended with this layer. */

import { make, percent, visible } from "./common.js";

/** A row for each layer, the likeliest guess first; the last row is what the model says. */
export function lensTable({ lens, after }, token) {
  const said = (after(token)?.top_logprobs ?? []).slice(0, lens[0]?.guesses[token].length);
  const rows = [...lens.map(({ layer, guesses }) => [`Layer ${layer}`, guesses[token]]), ["The model", said]];
  return make("table", { className: "lens" }, make("tbody", {}, ...rows.map(([name, guesses]) =>
    make("tr", {}, make("th", { scope: "row" }, name), ...guesses.map(cell)))));
}

function cell({ token, logprob }) {
  const made = make("td", {}, make("code", {}, visible(token)), " ", make("small", {}, percent(Math.exp(logprob))));
  made.style.setProperty("--w", Math.exp(logprob));
  return made;
}
