for (const part of data.kinds.flatMap(kind => kind.layers.flatMap(layer => layer.parts))) {
  part.maps = shorts(part.maps);
  part.peaks = floats(part.peaks);
}
const [kindSelect, layerSelect, headSelect, partSelect] =
  ["kind", "layer", "head", "part"].map(element);
const queriesPlace = element("queries"), keysPlace = element("keys");
const matrix = element("matrix"), all = element("all");
const now = { kind: 0, layer: 0, head: 0, part: 0, query: 0 };
element("aboutParts").hidden =
  !data.kinds.some(kind => kind.layers.some(layer => layer.parts.length > 1));

// The weights of a head for all queries, row by row.
function weightsOf(kind, part, head) {
  const T = kind.queries.length, S = kind.keys.length;
  return Float32Array.from(part.maps.subarray(head * T * S, (head + 1) * T * S),
    (value, n) => value / 65535 * part.peaks[head * T + Math.floor(n / S)]);
}

const byteOf = share => Math.round(255 * Math.min(1, share));

// A picture of one pixel for a weight.
function small(canvas, weights, T, S) {
  const peak = Math.max(...weights, 1e-30);
  paintBytes(canvas, Uint8Array.from(weights, weight => byteOf(weight / peak)), S, T);
}

function options(select, names, chosen) {
  select.replaceChildren(...names.map((name, n) => new Option(name, n, false, n === chosen)));
}

function showMatrix(kind, weights) {
  const T = kind.queries.length, S = kind.keys.length, cell = Math.max(6, Math.min(22, Math.floor(700 / Math.max(T, S))));
  const font = `${Math.min(13, cell - 1)}px system-ui, sans-serif`, context = matrix.getContext("2d");
  context.font = font;
  const widest = words => Math.ceil(Math.max(...words.map(word => context.measureText(word).width))) + 6;
  const left = widest(kind.queries), top = widest(kind.keys);
  const width = left + S * cell + 2, height = top + T * cell + 2, ratio = window.devicePixelRatio || 1;
  Object.assign(matrix, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
  Object.assign(matrix.style, { width: `${width}px`, height: `${height}px` });
  context.scale(ratio, ratio);
  const heat = create("canvas");
  small(heat, weights, T, S);
  context.imageSmoothingEnabled = false;
  context.drawImage(heat, left, top, S * cell, T * cell);
  const fillStyle = getComputedStyle(document.body).color;
  Object.assign(context, { font, fillStyle, textBaseline: "middle", textAlign: "right" });
  kind.queries.forEach((word, n) => context.fillText(word, left - 4, top + (n + 0.5) * cell));
  kind.keys.forEach((word, n) => {
    context.save();
    context.translate(left + (n + 0.5) * cell, top - 4);
    context.rotate(-Math.PI / 2);
    context.textAlign = "left";
    context.fillText(word, 0, 0);
    context.restore();
  });
  Object.assign(context, { strokeStyle: "#d00", lineWidth: 2 });
  context.strokeRect(left, top + now.query * cell, S * cell, cell);
  matrix.onclick = event => {
    const box = matrix.getBoundingClientRect(), y = (event.clientY - box.top) * height / box.height;
    const row = Math.floor((y - top) / cell);
    if (row >= 0 && row < T) choose({ query: row });
  };
}

function show() {
  const kind = data.kinds[now.kind], layer = kind.layers[now.layer], part = layer.parts[now.part];
  const S = kind.keys.length, weights = weightsOf(kind, part, now.head);
  options(kindSelect, data.kinds.map(one => one.title), now.kind);
  options(layerSelect, kind.layers.map(one => one.name), now.layer);
  options(headSelect, layer.heads, now.head);
  options(partSelect, layer.parts.map(one => one.name), now.part);
  element("partLabel").hidden = layer.parts.length < 2;
  queriesPlace.replaceChildren(...kind.queries.map((word, n) => {
    const chosen = n === now.query;
    const button = create("button", { type: "button", ariaPressed: String(chosen), tabIndex: chosen ? 0 : -1 }, word);
    button.addEventListener("click", () => choose({ query: n }, true));
    return button;
  }));
  const row = weights.subarray(now.query * S, (now.query + 1) * S), peak = Math.max(...row, 1e-30);
  keysPlace.replaceChildren(...kind.keys.map((word, n) => {
    const at = 3 * byteOf(row[n] / peak), ink = row[n] / peak < 0.6 ? "#fff" : "#000";
    const style = `background: rgb(${colours.slice(at, at + 3).join(" ")}); color: ${ink}`;
    return create("span", { style }, word, create("small", {}, `${percent(row[n])} %`));
  }));
  element("where").textContent =
    `${layer.name}, ${layer.heads[now.head]}${layer.parts.length > 1 ? `, ${part.name}` : ""}: ` +
    `greatest weight ${percent(Math.max(...weights))} %, uniform ${percent(1 / S)} % of ${S}`;
  showMatrix(kind, weights);
  for (const button of all.children) {
    button.ariaPressed = String(Number(button.dataset.layer) === now.layer && Number(button.dataset.head) === now.head);
  }
}

// Small pictures of all heads of the kind, with the part that is chosen where a layer has it.
function showAll() {
  const kind = data.kinds[now.kind], name = kind.layers[now.layer].parts[now.part].name;
  all.replaceChildren(...kind.layers.flatMap((layer, l) => layer.heads.map((head, h) => {
    const canvas = create("canvas", { ariaHidden: "true" });
    const button = create("button", { type: "button", title: layer.name }, canvas, `${l + 1}: ${head}`);
    const part = layer.parts.find(one => one.name === name) || layer.parts[0];
    small(canvas, weightsOf(kind, part, h), kind.queries.length, kind.keys.length);
    Object.assign(button.dataset, { layer: l, head: h });
    button.addEventListener("click", () => choose({ layer: l, head: h }));
    return button;
  })));
}

function choose(change, focus = false) {
  const before = { ...now };
  Object.assign(now, change);
  const kind = data.kinds[now.kind];
  if (now.kind !== before.kind) now.layer = kind.layers.length - 1;
  const layer = kind.layers[now.layer], old = data.kinds[before.kind].layers[before.layer];
  now.head = Math.min(now.head, layer.heads.length - 1);
  if (layer !== old) {  // keep the part if the layer has one of this name
    now.part = Math.max(0, layer.parts.findIndex(part => part.name === old.parts[now.part].name));
  }
  now.query = Math.max(0, Math.min(now.query, kind.queries.length - 1));
  if (now.kind !== before.kind || now.part !== before.part) showAll();
  show();
  if (focus) queriesPlace.children[now.query].focus();
}

for (const [name, select] of Object.entries({ kind: kindSelect, layer: layerSelect, head: headSelect, part: partSelect })) {
  select.addEventListener("change", () => choose({ [name]: Number(select.value) }));
}
onArrows(queriesPlace, ([y, x]) => choose({ query: now.query + y + x }, true));
now.layer = data.kinds[0].layers.length - 1;
showAll();
show();
