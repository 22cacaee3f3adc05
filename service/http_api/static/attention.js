/** What POST /v1/attention tells of a text: its tokens at once, the weights layer by layer as they are wanted. */

import { post } from "./common.js";
import { written } from "./request.js";

/** The most weights of one answer, and the most that are fetched before anybody asks for a layer. */
const MAX_NUMBERS = 524_288;
const MAX_UNASKED = 8 * MAX_NUMBERS;
const GUESSES = 5;

/** The first number of token i's row where the rows of a triangle follow each other. */
const start = (i) => (i * (i + 1)) / 2;

/** The weights of one head. Token i attends to the tokens 0 to i. */
class Head {
  constructor({ weights, sinks }) {
    this.values = new Float32Array(start(weights.length));
    weights.forEach((row, i) => this.values.set(row, start(i)));
    this.sinks = sinks;
  }

  /** The weights of token i, for the tokens 0 to i. */
  row = (i) => this.values.subarray(start(i), start(i + 1));
}

export class Attention {
  /** How many weights are here. */
  numbers = 0;

  /** Fetch the tokens of `text`: {prompt, answer, model} of the request. */
  static async of(text, signal) {
    const made = Object.assign(new Attention(), { text, signal });
    const { tokens, next, num_layers: layers, num_heads: heads, num_prompt_tokens: prompt } = await made.#ask({ layers: [] });
    Object.assign(made, { tokens, next, numHeads: heads, numPromptTokens: prompt, lens: null });
    made.layers = Array.from({ length: layers }, () => ({ heads: [] }));
    made.rest = made.#calls();
    return made;
  }

  async #ask(more) {
    return (await post("v1/attention", written({ ...this.text, ...more }), this.signal)).json();
  }

  /** The guesses of every layer at what comes after each token. */
  async fetchLens() {
    const { logit_lens: lens } = await this.#ask({ layers: [], top_logprobs: 0, logit_lens: GUESSES });
    this.lens = lens;
  }

  /** Weights in calls that each fit into one answer: of several layers, of a layer, or of some heads of a layer. */
  #calls() {
    const fit = Math.floor(MAX_NUMBERS / start(this.tokens.length)); // heads in one answer
    const [layers, heads] = [this.layers.map((_, i) => i), Array.from({ length: this.numHeads }, (_, i) => i)];
    if (fit >= this.numHeads) return parts(layers, Math.floor(fit / this.numHeads)).map((some) => ({ layers: some, heads: null }));
    return layers.flatMap((layer) => parts(heads, fit).map((some) => ({ layers: [layer], heads: some })));
  }

  /** Fetch weights, of the layer that `wanted()` names first, and tell `arrived` of each answer; ends where enough is there. */
  async fetchWeights(wanted, arrived) {
    if (this.fetching) return; // whoever fetches asks what is wanted before each call
    this.fetching = true;
    try {
      for (let next = this.#next(wanted()); next; next = this.#next(wanted())) {
        this.#take(await this.#ask({ ...next, top_logprobs: 0 }));
        this.rest = this.rest.filter((one) => one !== next);
        arrived(next.layers);
      }
    } finally {
      this.fetching = false;
    }
  }

  #next(layer) {
    const enough = this.numbers >= MAX_UNASKED;
    return this.rest.find(({ layers }) => layers.includes(layer)) ?? (enough ? undefined : this.rest[0]);
  }

  #take({ layers }) {
    for (const { layer, kind, window, heads } of layers) {
      Object.assign(this.layers[layer], { kind, window });
      for (const head of heads) this.layers[layer].heads[head.head] = new Head(head);
      this.numbers += heads.length * start(this.tokens.length);
    }
  }

  /** What could stand after token i: {entropy, top_logprobs}. */
  after = (i) => this.tokens[i + 1] ?? this.next;
}

/** A list in parts of at most `size`. */
const parts = (all, size) => Array.from({ length: Math.ceil(all.length / size) }, (_, i) => all.slice(i * size, (i + 1) * size));
