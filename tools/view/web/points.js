// Sampling points of deformable attention: for the query pixel on every level, and for objects (objects.js).
const headSelect = element("head"), headLabel = element("headLabel");

function decodePoints(held) {
  held.places = shorts(held.places);
  held.weights = bytes(held.weights);
  held.peaks = floats(held.peaks);
}

// The points of query number q: head, level, (x, y) relative to the picture, weight relative to the greatest.
function pointsOf(layer, held, q) {
  const levels = layer.shapes.length, count = layer.heads * levels * layer.samples, points = [];
  for (let n = 0; n < count; n++) {
    const at = q * count + n, place = [0, 1].map(k => held.places[2 * at + k] / 65535 * (1 + 2 * layer.reach) - layer.reach);
    points.push({ head: Math.floor(n / (levels * layer.samples)), level: Math.floor(n / layer.samples) % levels,
      place, weight: held.weights[at] / 255 });
  }
  return points.sort((a, b) => a.weight - b.weight);
}

// Draws the points over the picture, the least weight first; returns their number for the chosen head.
function paintPoints(canvas, layer, points, under) {
  const context = canvas.getContext("2d"), chosen = headSelect.value;
  Object.assign(context, { globalAlpha: 1, fillStyle: "#fff" });
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.globalAlpha = 0.8;
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  context.globalAlpha = 1;
  under();
  let painted = 0;
  for (const { head, level, place: [x, y], weight } of points) {
    if (chosen !== "all" && Number(chosen) !== head) continue;
    painted++;
    context.beginPath();
    context.arc(x * canvas.width, y * canvas.height, (1.2 + 8 * Math.sqrt(weight)) * canvas.width / 480, 0, 2 * Math.PI);
    Object.assign(context, { fillStyle: layer.colours[level], lineWidth: 0.6, strokeStyle: "#000" });
    context.fill();
    context.stroke();
  }
  return painted;
}

// Colours of the levels, after a section's title.
function legend(note, layer) {
  layer.shapes.forEach(([H, W], level) => {
    const dot = create("span", { className: "key", style: `background: ${layer.colours[level]}` });
    note.append(create("span", { style: "white-space: nowrap" }, dot, `${H}×${W}`), " ");
  });
}

function mark(canvas, [y, x]) {
  const context = canvas.getContext("2d"), left = x * canvas.width, top = y * canvas.height;
  Object.assign(context, { strokeStyle: "#000", lineWidth: 2 });
  context.stroke(new Path2D(`M ${left - 6} ${top} h 12 M ${left} ${top - 6} v 12`));
}

const pointPanels = [];
data.points.forEach((layer, l) => {
  select.add(new Option(layer.name, `points ${l}`));
  const { section, note, heads } = sectionIn(layersPlace, layer.name, "points by level, the larger the more weight:");
  legend(note, layer);
  layer.levels.forEach((level, n) => {
    decodePoints(level);
    pointPanels.push({ layer, l, level, n, section, ...panelIn(heads) });
  });
});
const pointed = data.points.concat(data.objects ? data.objects.points : []);
if (pointed.length) {
  headLabel.hidden = element("aboutPoints").hidden = false;
  for (let n = 0; n < Math.max(...pointed.map(layer => layer.heads)); n++) headSelect.add(new Option(n + 1, n));
}
headSelect.addEventListener("change", () => { show(); showObject(); });

function showPoints() {
  for (const { layer, l, level, n, section, canvas, text } of pointPanels) {
    const shown = select.value === "all" || select.value === `points ${l}`;
    section.hidden = !shown;
    if (!shown) continue;
    const [y, x] = cellOf(level), q = y * level.queries[1] + x, shape = layer.shapes[n];
    const place = [level.rows[y], level.columns[x]].map((k, axis) => (k + 0.5) / (shape[axis] * data.share[axis]));
    const points = pointsOf(layer, level, q);
    const painted = paintPoints(canvas, layer, points, () => mark(canvas, place));
    text.textContent = `query (${level.rows[y]}, ${level.columns[x]}) of ${shape.join("×")}: ${painted} points, ` +
      `greatest weight ${percent(level.peaks[q])} %`;
  }
}
