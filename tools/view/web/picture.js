const withParts = data.layers.flatMap(layer => [layer, ...Object.values(layer.parts || {})]);
for (const held of withParts.flatMap(layer => layer.cls ? [layer, layer.cls] : [layer])) {
  held.maps = bytes(held.maps);
  for (const name of ["peaks", "uniform", "elsewhere"]) if (held[name]) held[name] = floats(held[name]);
}
const [image, picture, cross, where, select, opacity] =
  ["image", "picture", "cross", "where", "layer", "opacity"].map(element);
const grids = data.layers.map(layer => layer.queries).concat(
  ...data.points.map(layer => layer.levels.map(level => level.queries)));
const finest = [0, 1].map(n => Math.max(1, ...grids.map(grid => grid[n])));
let query = [0.5, 0.5];  // relative to the picture's height and width
let fromCls = data.layers.some(layer => layer.cls);  // whether the query is the cls token instead

// The cell of a map of queries that contains the query. Maps cover the padding, which the page cuts off.
function cellOf({ queries }) {
  return queries.map((n, axis) => Math.min(n - 1, Math.floor(query[axis] * data.share[axis] * n)));
}

// A head's map for the query: bytes relative to its maximum, the maximum, the weight of uniform attention, and the
// weight of keys without a place.
function mapOf(layer, head) {
  const part = partOf(layer), held = fromCls ? part.cls : part, [y, x] = fromCls ? [0, 0] : cellOf(layer);
  const [Hq, Wq] = fromCls ? [1, 1] : layer.queries, size = layer.keys[0] * layer.keys[1];
  const n = (head * Hq + y) * Wq + x;
  return { values: held.maps.subarray(n * size, (n + 1) * size), peak: held.peaks[n],
    uniform: held.uniform[y * Wq + x], elsewhere: held.elsewhere && held.elsewhere[n] };
}

// A button with a canvas of the picture's shape and a line of text; it enlarges itself.
function panelIn(heads) {
  const size = { width: 320, height: Math.round(320 * data.height / data.width) };
  const canvas = create("canvas", { ...size, ariaHidden: "true" }), text = create("span");
  const button = create("button", { type: "button", className: "head", ariaPressed: "false" }, canvas, text);
  button.addEventListener("click", () => { button.ariaPressed = String(button.ariaPressed !== "true"); });
  heads.append(button);
  return { canvas, text };
}

// Adds a section with a title and a note; returns the element for its panels.
function sectionIn(parent, name, words) {
  const note = create("small", {}, words), heads = create("div", { className: "heads" });
  const section = create("section", {}, create("h2", {}, name + " ", note), heads);
  parent.append(section);
  return { section, note, heads };
}

const panels = [];
const layersPlace = element("layers");
data.layers.forEach((layer, l) => {
  select.add(new Option(layer.name, l));
  const { section, heads } = sectionIn(layersPlace, layer.name,
    `${layer.queries.join("×")} queries, ${layer.keys.join("×")} keys` +
    (layer.note ? ` (of this page: ${layer.note})` : ""));
  for (let head = 0; head < layer.heads; head++) panels.push({ layer, l, head, section, ...panelIn(heads) });
});

const small = create("canvas");
// Draws the bytes of a map over the picture; returns the place of the greatest. `part` is the share without padding.
function heat(canvas, values, [Hk, Wk], part) {
  paintBytes(small, values, Wk, Hk);
  const context = canvas.getContext("2d");
  context.globalAlpha = 1;
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  context.globalAlpha = 1 - opacity.value / 100;
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, canvas.width / part[1], canvas.height / part[0]);
  context.globalAlpha = 1;
  return values.indexOf(Math.max(...values));
}

function paint({ layer, head, canvas, text }) {
  const { values, peak, uniform, elsewhere } = mapOf(layer, head), Wk = layer.keys[1];
  const best = heat(canvas, values, layer.keys, data.share);
  const [y, x] = cellOf(layer), [h, w] = layer.queries.map((n, axis) => 1 / (n * data.share[axis]));
  if (!fromCls) outline(canvas, [x * w, y * h, (x + 1) * w, (y + 1) * h], "#f00", 3);
  const at = wordsOf([Math.floor(best / Wk), best % Wk], layer.keys, (y, x) => `row ${y + 1}, column ${x + 1}`);
  text.textContent = `${layer.names[head]}: max ${percent(peak)} % at ${at} (uniform ${percent(uniform)} %)` +
    (elsewhere == null ? "" : `; ${percent(elsewhere)} % on ${layer.without}`);
}

function show() {
  const size = finest.map((n, axis) => 1 / (n * data.share[axis])), cell = cellOf({ queries: finest });
  const [top, left, height, width] = [cell[0] * size[0], cell[1] * size[1], ...size].map(share => 100 * share + "%");
  Object.assign(cross.style, { top, left, height, width });
  const [y, x] = [data.height, data.width].map((n, axis) => Math.floor(query[axis] * n * data.pixel[axis]));
  const [rows, columns] = data.file.map((n, axis) => n / (data.frames ? data.frames[axis] : 1));
  where.textContent = fromCls ? "Query: the cls token"
    : `Query: ${wordsOf([y, x], data.file, (y, x) => `pixel (${y}, ${x})`)} of ${rows} rows and ${columns} columns`;
  for (const panel of panels) {
    const shown = (select.value === "all" || Number(select.value) === panel.l) && !(fromCls && !panel.layer.cls) &&
      partOf(panel.layer);
    panel.section.hidden = !shown;
    if (shown) paint(panel);
  }
  showPoints();
}

function move(to) {
  query = to.map(n => Math.min(Math.max(n, 0), 1 - 1e-9));
  lookFrom(false);
}

function point(event) {
  const box = picture.getBoundingClientRect();
  move([(event.clientY - box.top) / box.height, (event.clientX - box.left) / box.width]);
}
picture.addEventListener("pointerdown", event => { picture.setPointerCapture(event.pointerId); point(event); });
picture.addEventListener("pointermove", event => { if (event.buttons) point(event); });
// From the middle of one cell of the finest map to the middle of another.
onArrows(picture, (step, event) => move(cellOf({ queries: finest }).map((n, axis) =>
  (n + step[axis] * (event.shiftKey ? 4 : 1) + 0.5) / (finest[axis] * data.share[axis]))));
