/** The explorer: whom each token of a text attends to, in the head that is chosen, and what each layer would say next. */

import { Attention } from "./attention.js";
import { bars, byId, make, percent, rove, showError, spoken, visible } from "./common.js";
import { lensTable } from "./lens.js";
import { drawLinks } from "./links.js";
import { drawMaps, mapsTable } from "./maps.js";
import { fail } from "./server.js";

const STRONGEST = 5;
let controller = null;
let attention = null;
/** What is chosen. */
let at = { token: 0, layer: 0, head: 0 };

const chips = () => [...byId("links").querySelectorAll(".chip")];
const maps = () => [...byId("heads").querySelectorAll("button")];
const head = () => attention.layers[at.layer].heads[at.head];

/** Fetch and show the attention of a text: {prompt, answer, model} of the request. A second call takes the place of the first. */
export async function explore(text) {
  controller?.abort();
  const mine = controller = new AbortController();
  byId("explorer").hidden = false;
  byId("explorer").ariaBusy = "true";
  byId("explorer-name").focus();
  showError(byId("explorer-error"), null);
  say("Reading the text");
  try {
    const read = await Attention.of(text, mine.signal);
    attention = read;
    at = { token: read.tokens.length - 1, layer: 0, head: 0 };
    showText();
    say("Fetching the weights");
    await fetchWeights();
    say("Computing the logit lens");
    await read.fetchLens();
    showToken();
    say(`${read.tokens.length} tokens, ${read.layers.length} layers of ${read.numHeads} heads`);
  } catch (error) {
    report(error, mine);
  }
  if (mine === controller) byId("explorer").ariaBusy = "false";
}

function report(error, mine = controller) {
  if (mine.signal.aborted) return;
  say("");
  fail(error, byId("explorer-error"));
}

const say = (text) => Object.assign(byId("explorer-status"), { textContent: text });

const fetchWeights = () => attention.fetchWeights(() => at.layer, (layers) => {
  const first = attention.layers.findIndex(({ heads }) => heads.length);
  if (layers.includes(at.layer) && !attention.layers[at.layer].heads.length && first >= 0) at.layer = first; // it keeps a state
  drawMaps(byId("heads"), attention, layers);
  if (layers.includes(at.layer)) showHead();
});

function showText() {
  const parts = attention.tokens.flatMap(({ token }, i) => {
    const className = i < attention.numPromptTokens ? "chip" : "chip made";
    const chip = make("span", { className, role: "button", tabIndex: i === at.token ? 0 : -1 }, visible(token) || "∅");
    chip.ariaLabel = `${i}: ${spoken(token)}`;
    return token.includes("\n") ? [chip, make("br")] : [chip];
  });
  byId("links").replaceChildren(...parts);
  byId("heads").replaceChildren(mapsTable(attention));
  showHead();
}

/** What depends on the head that is chosen. */
function showHead() {
  for (const map of maps()) map.ariaPressed = `${map.layer === at.layer && map.head === at.head}`;
  const chosen = maps().find((map) => map.ariaPressed === "true");
  if (chosen && !maps().includes(document.activeElement)) for (const map of maps()) map.tabIndex = map === chosen ? 0 : -1;
  showToken();
}

/** What depends on the token that is chosen. */
function showToken() {
  chips().forEach((chip, i) => (chip.ariaPressed = `${i === at.token}`));
  point(at.token);
  byId("chosen").replaceChildren(...facts());
  byId("lens").replaceChildren(...(attention.lens ? [lensTable(attention, at.token)] : []));
}

/** Links and shades of the token that is pointed at. */
function point(token) {
  drawLinks(byId("links"), chips(), token, head()?.row(token) ?? []);
}

/** The chosen token in words. */
function facts() {
  const { id, token, logprob, entropy } = attention.tokens[at.token];
  const own = [`id ${id}`, ...(logprob === null ? [] : [`probability ${percent(Math.exp(logprob))}`, `entropy ${entropy.toFixed(2)} nats`])];
  const rows = [...(head()?.row(at.token) ?? [])].map((weight, i) => [attention.tokens[i].token, weight]);
  const sink = head()?.sinks ? [["(sink)", head().sinks[at.token]]] : [];
  const strongest = [...rows, ...sink].sort((a, b) => b[1] - a[1]).slice(0, STRONGEST);
  return [make("code", { className: "name" }, visible(token)), make("span", {}, own.join(" · ")),
    make("span", {}, `attends in layer ${at.layer}, head ${at.head} to`), bars(strongest)];
}

function choose(change) {
  at = { ...at, ...change };
  if ("token" in change) return showToken();
  showHead();
  fetchWeights().catch(report);
}

const links = byId("links");
links.addEventListener("pointerover", ({ target }) => chips().includes(target) && point(chips().indexOf(target)));
links.addEventListener("pointerleave", () => attention && point(at.token));
for (const kind of ["click", "focusin"]) {
  links.addEventListener(kind, ({ target }) => {
    const token = chips().indexOf(target);
    if (token >= 0 && token !== at.token) choose({ token });
  });
}
rove(links, chips);
for (const kind of ["click", "focusin"]) {
  byId("heads").addEventListener(kind, ({ target }) => {
    const map = target.closest("button");
    if (map && (map.layer !== at.layer || map.head !== at.head)) choose({ layer: map.layer, head: map.head });
  });
}
rove(byId("heads"), maps, () => attention.numHeads);
new ResizeObserver(() => attention && point(at.token)).observe(links);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  if (attention) drawMaps(byId("heads"), attention, attention.layers.keys());
});
