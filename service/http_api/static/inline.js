/** The text inside of a block of Markdown as nodes: code, emphasis, links, line breaks. */

import { make } from "./common.js";

/** Where a link may lead: nothing here runs, and nothing is loaded until a person follows it. */
const LINKS = /^(https?:\/\/|mailto:)/i;
const URL = /<([^<>\n]*)>|((?:\\.|[^\s()\\]|\((?:\\.|[^\s()\\])*\))*)/s;
const TITLE = /"[^"]*"|'[^']*'|\([^()]*\)/;
const TARGET = new RegExp(`\\([ \\n]*(?:${URL.source})(?:[ \\n]+(?:${TITLE.source}))?[ \\n]*\\)`, "sy");
const BARE = /https?:\/\/(?:[^\s<()]|\([^\s<()]*\))+/iy;
const AUTOLINK = /<(https?:\/\/[^\s<>]*|[\w.+-]+@[\w-]+(?:\.[\w-]+)+)>/iy;
const CODE = /(`+)(?!`)/y;
const ESCAPED = /\\([!-/:-@[-`{-~])/y;
const ENTITY = /&(?:#(\d{1,7})|#x([\da-f]{1,6})|(amp|lt|gt|quot|apos|nbsp|copy|hellip|mdash|ndash|times));/iy;
const NAMED = {
  amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", hellip: "…", mdash: "—", ndash: "–",
  times: "×",
};
const BREAK = /(?: *|\\)\n/y;
const RUN = /(\*+|_+|~~)/y;
const TAGS = { "*": "em", _: "em", "**": "strong", __: "strong", "~~": "s" };
const MARK = /[\p{P}\p{S}]/u;
const PLAIN = /[^\\`*_~[\]!<&\n h]+| +(?! *\n)|h(?!ttps?:\/\/)/iy;
const MAX_LABEL = 2000;
/** Marks that may still be closed. Those before them stay text. */
const MAX_OPEN = 100;

const at = (pattern, text, place) => {
  pattern.lastIndex = place;
  return pattern.exec(text);
};

export const link = (href, ...children) => make("a", { href, target: "_blank", rel: "noopener noreferrer" }, ...children);

/** The nodes of a text. `isLabel`: inside of a link, which holds no other. */
export function inline(text, isLabel = false) {
  const nodes = [];
  const open = [];
  for (let place = 0; place < text.length;) {
    const [length, ...made] = token(text, place, isLabel, nodes, open);
    nodes.push(...made);
    place += length;
  }
  return joined(nodes);
}

/** Read one token: its length, and the nodes that it makes. Emphasis that it ends is made of the last of `nodes`. */
function token(text, place, isLabel, nodes, open) {
  let found = null;
  if ((found = at(PLAIN, text, place))) return [found[0].length, found[0]];
  if ((found = at(ESCAPED, text, place))) return [2, found[1]];
  if ((found = at(BREAK, text, place))) return [found[0].length, make("br")];
  if ((found = at(CODE, text, place))) return code(text, place, found[1]);
  if ((found = at(ENTITY, text, place))) return [found[0].length, decoded(found)];
  if ((found = at(RUN, text, place))) return [found[1].length, ...emphasis(text, place, found[1], nodes, open)];
  if (!isLabel && (found = at(AUTOLINK, text, place))) {
    return [found[0].length, link(found[1].includes("://") ? found[1] : `mailto:${found[1]}`, found[1])];
  }
  if (!isLabel && (found = at(BARE, text, place))) return bare(found[0]);
  const isImage = text.startsWith("![", place);
  if (isImage || text[place] === "[") return reference(text, place, isImage, isLabel);
  return [1, text[place]];
}

function code(text, place, ticks) {
  const end = new RegExp(`(?<!\`)${ticks}(?!\`)`, "g");
  end.lastIndex = place + ticks.length;
  const found = end.exec(text);
  if (!found) return [ticks.length, ticks];
  const inside = text.slice(place + ticks.length, found.index).replaceAll("\n", " ");
  const isPadded = inside.startsWith(" ") && inside.endsWith(" ") && inside.trim();
  return [found.index + ticks.length - place, make("code", {}, isPadded ? inside.slice(1, -1) : inside)];
}

function decoded([whole, decimal, hex, name]) {
  if (name) return NAMED[name.toLowerCase()];
  const number = Number.parseInt(decimal ?? hex, decimal ? 10 : 16);
  return number > 0 && number <= 0x10ffff ? String.fromCodePoint(number) : whole;
}

/** An address in the text, without the marks that end a sentence. */
function bare(found) {
  let end = found.length;
  while (".,:;!?'\"*_~]".includes(found[end - 1])) end -= 1;
  const url = found.slice(0, end);
  return [end, link(url, url)];
}

/** A link or an image, where its address may be followed; else its bracket is text. */
function reference(text, place, isImage, isLabel) {
  const begin = place + (isImage ? 2 : 1);
  const end = closing(text, begin);
  const found = end > 0 && at(TARGET, text, end + 1);
  const url = found && (found[1] ?? found[2]).replace(/\\([!-/:-@[-`{-~])/g, "$1").replace(/&[^;\s]*;/g, (entity) => {
    const parts = at(ENTITY, entity, 0);
    return parts ? decoded(parts) : entity;
  });
  if (!url || !LINKS.test(url) || isLabel) return [isImage ? 2 : 1, isImage ? "![" : "["];
  const label = text.slice(begin, end);
  const length = end + 1 + found[0].length - place;
  return [length, link(url, ...(isImage ? [label || "image"] : inline(label, true)))];
}

/** Where the bracket that begins before `place` ends; 0 where it does not. */
function closing(text, place) {
  for (let depth = 1, i = place; i < Math.min(text.length, place + MAX_LABEL); i += 1) {
    if (text[i] === "\\") i += 1;
    else if (text[i] === "[") depth += 1;
    else if (text[i] === "]" && !(depth -= 1)) return i;
  }
  return 0;
}

/** Marks of emphasis, by CommonMark's rules: they end what is open, or stay text that may be closed later. */
function emphasis(text, place, run, nodes, open) {
  const [before, after] = [text[place - 1] ?? " ", text[place + run.length] ?? " "];
  const isLeft = /\S/.test(after) && (!MARK.test(after) || /\s/.test(before) || MARK.test(before));
  const isRight = /\S/.test(before) && (!MARK.test(before) || /\s/.test(after) || MARK.test(after));
  const opens = isLeft && (run[0] !== "_" || !isRight || MARK.test(before));
  const closes = isRight && (run[0] !== "_" || !isLeft || MARK.test(after));
  let rest = run;
  for (let i = open.length - 1; closes && i >= 0 && rest; i -= 1) {
    const { begin, mark, length, isBoth } = open[i];
    const isOdd = (isBoth || opens) && (length + run.length) % 3 === 0 && (length % 3 || run.length % 3);
    if (mark[0] !== rest[0] || isOdd || begin + 1 === nodes.length) continue;
    const size = Math.min(mark.length, rest.length, 2);
    const inside = joined(nodes.splice(begin + 1));
    nodes[begin] = mark.slice(size);
    nodes.push(make(TAGS[rest.slice(0, size)], {}, ...inside));
    open.length = i;
    if (nodes[begin]) open[i++] = { begin, mark: nodes[begin], length, isBoth };
    rest = rest.slice(size);
  }
  if (rest && opens) {
    if (open.length === MAX_OPEN) open.shift();
    open.push({ begin: nodes.length, mark: rest, length: run.length, isBoth: closes });
  }
  return rest ? [rest] : [];
}

/** Neighbours that are texts as one text. */
function joined(nodes) {
  const made = [];
  for (const node of nodes) {
    if (typeof node === "string" && typeof made.at(-1) === "string") made[made.length - 1] += node;
    else if (node !== "") made.push(node);
  }
  return made;
}
