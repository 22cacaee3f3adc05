/** The text inside of a block of Markdown as nodes: code, emphasis, links, line breaks. */

import { make } from "./common.js";

/** Where a link may lead: nothing here runs, and nothing is loaded until a person follows it. */
const LINKS = /^(https?:\/\/|mailto:)/i;
const URL = /<([^<>\n]*)>|((?:\\.|[^\s()\\]|\((?:\\.|[^\s()\\])*\))*)/s;
const TITLE = /"[^"]*"|'[^']*'|\([^()]*\)/;
const TARGET = new RegExp(`\\([ \\n]*(?:${URL.source})(?:[ \\n]+(?:${TITLE.source}))?[ \\n]*\\)`, "sy");
const BARE = /https?:\/\/(?:[^\s<>()]|\([^\s<>()]*\))+/iy;
const CODE = /(`+)(?!`)/y;
const ESCAPED = /\\([!-/:-@[-`{-~])/y;
const BREAK = /(?: *|\\)\n/y;
const RUN = /(\*+|_+|~~)/y;
/** Emphasis: its text begins and ends with no space; marks inside of words are text where they are `_`. */
const EMPHASIS = [
  [/\*\*(?=\S)(.{1,2000}?)(?<=\S)\*\*(?!\*)/sy, "strong"],
  [/(?<![\p{L}\p{N}_])__(?=\S)(.{1,2000}?)(?<=\S)__(?![\p{L}\p{N}_])/suy, "strong"],
  [/~~(?=\S)(.{1,2000}?)(?<=\S)~~/sy, "s"],
  [/\*(?=[^\s*])(.{1,2000}?)(?<=[^\s*])\*(?!\*)/sy, "em"],
  [/(?<![\p{L}\p{N}_])_(?=[^\s_])(.{1,2000}?)(?<=[^\s_])_(?![\p{L}\p{N}_])/suy, "em"],
];
const PLAIN = /[^\\`*_~[\]!<\n h]+| +(?! *\n)|h(?!ttps?:\/\/)/iy;
const MAX_LABEL = 2000;

const at = (pattern, text, place) => {
  pattern.lastIndex = place;
  return pattern.exec(text);
};

export const link = (href, ...children) => make("a", { href, target: "_blank", rel: "noopener noreferrer" }, ...children);

/** The nodes of a text. `isLabel`: inside of a link, which holds no other. */
export function inline(text, isLabel = false) {
  const nodes = [];
  for (let place = 0; place < text.length;) {
    const [length, ...made] = token(text, place, isLabel);
    nodes.push(...made);
    place += length;
  }
  return joined(nodes);
}

/** Read one token: its length, and the nodes that it makes. */
function token(text, place, isLabel) {
  let found = null;
  if ((found = at(PLAIN, text, place))) return [found[0].length, found[0]];
  if ((found = at(ESCAPED, text, place))) return [2, found[1]];
  if ((found = at(BREAK, text, place))) return [found[0].length, make("br")];
  if ((found = at(CODE, text, place))) return code(text, place, found[1]);
  if ((found = at(RUN, text, place))) return emphasis(text, place, found[1], isLabel);
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
  const url = found && (found[1] ?? found[2]).replace(/\\([!-/:-@[-`{-~])/g, "$1");
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

/** Text between marks of emphasis, or the marks as text. */
function emphasis(text, place, run, isLabel) {
  for (const [pattern, tag] of EMPHASIS) {
    const found = at(pattern, text, place);
    if (found) return [found[0].length, make(tag, {}, ...inline(found[1], isLabel))];
  }
  return [run.length, run];
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
