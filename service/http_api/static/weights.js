/** The weights as the table of queries and keys: rows ask, columns answer. */

import { make, percent, spoken } from "./common.js";

const MOST = 12;

/** The rows and columns up to the token that asks, and what the columns before them hold together. */
export function weightsTable({ tokens }, head, token) {
  const first = Math.max(0, token - MOST + 1);
  const shown = tokens.slice(first, first + MOST).map((_, i) => first + i);
  const columns = [
    ...(first ? [["earlier", (i) => sum(head.row(i).subarray(0, first))]] : []),
    ...shown.map((j) => [spoken(tokens[j].token), (i) => (j > i ? undefined : head.row(i)[j])]),
    ...(head.sinks ? [["sink", (i) => head.sinks[i]]] : []),
  ];
  const names = columns.map(([name]) => make("th", { scope: "col" }, make("span", {}, name)));
  const rows = shown.map((i) => make("tr", { className: i === token ? "chosen" : "" },
    make("th", { scope: "row" }, spoken(tokens[i].token)), ...columns.map(([, weight]) => cell(weight(i)))));
  const corner = make("td", {}, "q \\ k");
  return make("table", { className: "weights" }, make("thead", {}, make("tr", {}, corner, ...names)), make("tbody", {}, ...rows));
}

const sum = (values) => values.reduce((all, value) => all + value, 0);

/** Nothing stands above the diagonal: no token attends to a later one. */
function cell(weight) {
  if (weight === undefined) return make("td", {});
  const made = make("td", { title: percent(weight) }, weight < 0.005 ? "·" : `${Math.round(weight * 100)}`);
  made.style.setProperty("--w", weight);
  return made;
}
