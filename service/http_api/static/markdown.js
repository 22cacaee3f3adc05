/** Markdown as elements. No text becomes markup: the parser's tokens are read, and each element is made here. So HTML stays
 * text, an image is a link to it, and a link leads to an address that is written out, or writes mail. */

import MarkdownIt from "./markdown-it.js";
import { make } from "./common.js";

/** Where a link may lead: nothing here runs, and nothing is loaded until a person follows it. */
const LINKS = /^(https?:\/\/|mailto:)/i;
const ALIGNED = /text-align:(\w+)/;

const parser = new MarkdownIt({ html: false, linkify: true });
parser.validateLink = (url) => LINKS.test(url);
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // `attend.py` is no address
parser.disable("lheading"); // a list that has just begun would be a heading for a moment

/** The elements of a text. */
export const elements = (text) => build(parser.parse(text, {}), make("div"));

function build(tokens, root) {
  let place = root;
  for (const token of tokens) {
    if (token.hidden) continue; // the paragraph of a tight list
    if (token.type === "inline") build(token.children, place);
    else if (token.nesting > 0) place = open(token, place);
    else if (token.nesting < 0) place = (token.tag === "table" ? place.parentNode : place).parentNode;
    else place.append(...leaf(token));
  }
  return root;
}

function open(token, place) {
  const made = token.tag === "a" ? link(token.attrGet("href")) : make(token.tag);
  if (token.tag === "ol") made.start = token.attrGet("start") ?? 1;
  if (token.tag === "th" || token.tag === "td") made.style.textAlign = ALIGNED.exec(token.attrGet("style"))?.[1] ?? "";
  place.append(token.tag === "table" ? make("div", { className: "wide", tabIndex: 0 }, made) : made);
  return made;
}

const link = (href, ...children) => make("a", { href, target: "_blank", rel: "noopener noreferrer" }, ...children);

function leaf({ type, content, info, tag, attrs }) {
  if (type === "fence" || type === "code_block") return [codeBlock(content, info.trim().split(/\s+/)[0])];
  if (type === "code_inline") return [make("code", {}, content)];
  if (type === "image") return [link(new Map(attrs).get("src"), content || "image")];
  if (type === "softbreak") return [make("br")];
  return tag ? [make(tag)] : [content];
}

function codeBlock(text, language) {
  const copy = make("button", { type: "button", className: "quiet copy" }, "Copy");
  const head = make("div", { className: "head" }, make("span", {}, language || "code"), copy);
  return make("div", { className: "block" }, head, make("pre", { tabIndex: 0 }, make("code", {}, text.replace(/\n$/, ""))));
}

/** Make the children of `old` like those of `fresh`. What is the same stays the element that it is: nothing jumps, and a
 * selection holds. */
export function patch(old, fresh) {
  const before = [...old.childNodes];
  const after = [...fresh.childNodes];
  after.forEach((node, i) => {
    const its = before[i];
    if (!its) old.append(node);
    else if (its.isEqualNode(node)) return;
    else if (its.nodeType === Node.TEXT_NODE && node.data?.startsWith(its.data)) its.appendData(node.data.slice(its.length));
    else if (its.cloneNode().isEqualNode(node.cloneNode())) patch(its, node);
    else its.replaceWith(node);
  });
  for (const rest of before.slice(after.length)) rest.remove();
}
