/** The heads of all layers as small heat maps: a row for each token that asks, a column for each that answers. */

import { make } from "./common.js";

const MAX_PIXELS = 96;

/** A table with a row for each layer and a button for each head, whose maps `drawMaps` draws. */
export function mapsTable({ layers, numHeads }) {
  const heads = Array.from({ length: numHeads }, (_, i) => i);
  const names = make("tr", {}, make("td", {}), ...heads.map((head) => make("th", { scope: "col" }, `${head}`)));
  const rows = layers.map((_, layer) => make("tr", {}, make("th", { scope: "row" }, `${layer}`), ...heads.map((head) => cell(layer, head))));
  return make("table", { className: "maps", ariaLabel: "Layers, and their heads" }, make("thead", {}, names), make("tbody", {}, ...rows));
}

function cell(layer, head) {
  const button = make("button", { type: "button", layer, head, tabIndex: -1 }, make("canvas", { width: 1, height: 1 }));
  button.ariaLabel = `Layer ${layer}, head ${head}`;
  return make("td", {}, button);
}

/** Draw the maps of these layers, as far as their weights are there. */
export function drawMaps(place, attention, layers) {
  const colour = accent();
  for (const index of layers) {
    const row = place.querySelectorAll("tbody tr")[index];
    const { kind, heads } = attention.layers[index];
    if (kind && kind !== "attention") row.replaceChildren(row.firstChild, note(attention));
    else heads.forEach((head, i) => draw(row.querySelectorAll("canvas")[i], head, attention.tokens.length, colour));
  }
}

const note = ({ numHeads }) => make("td", { colSpan: numHeads, className: "hint" }, "recurrent state: no weights");

/** A pixel shows the largest weight of those that fall on it; its square root, so that small ones can be seen. */
function draw(canvas, head, length, [red, green, blue]) {
  const size = Math.min(length, MAX_PIXELS);
  const largest = new Float32Array(size * size);
  for (let i = 0; i < length; i += 1) {
    const down = Math.floor((i * size) / length) * size;
    head.row(i).forEach((weight, j) => {
      const pixel = down + Math.floor((j * size) / length);
      if (weight > largest[pixel]) largest[pixel] = weight;
    });
  }
  Object.assign(canvas, { width: size, height: size });
  const image = new ImageData(size, size);
  largest.forEach((weight, pixel) => image.data.set([red, green, blue, 255 * Math.sqrt(weight)], 4 * pixel));
  canvas.getContext("2d").putImageData(image, 0, 0);
}

/** The page's colour as red, green, blue. */
function accent() {
  const context = new OffscreenCanvas(1, 1).getContext("2d");
  context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--accent");
  context.fillRect(0, 0, 1, 1);
  return context.getImageData(0, 0, 1, 1).data;
}
