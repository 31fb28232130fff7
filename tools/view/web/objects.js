// Object queries: boxes on the picture, and the attention of the chosen object.
const [objectsPlace, boxes, chosenText, objectSelect, attended] =
  ["found", "boxes", "chosen", "object", "attended"].map(element);
const objects = data.objects, objectPanels = [];
let chosenObject = 0;

if (objects) {
  element("objects").hidden = false;
  if (!data.layers.length && !data.points.length) {
    document.querySelector("main").hidden = true;
    document.querySelector("#choose .controls").append(headLabel, opacity.closest("label"));
  }
  Object.assign(boxes, { width: 640, height: Math.round(640 * data.height / data.width) });
  objects.list.forEach((object, n) => objectSelect.add(new Option(object.title, n)));
  if (objects.masks) {
    objects.masks.maps = bytes(objects.masks.maps);
    const { heads } = sectionIn(attended, "Mask", `${objects.masks.size.join("×")} of the page`);
    objectPanels.push({ kind: "mask", ...panelIn(heads) });
  }
  for (const layer of objects.maps) {
    layer.maps = bytes(layer.maps);
    for (const key of ["peaks", "uniform"]) layer[key] = floats(layer[key]);
    const { heads } = sectionIn(attended, layer.name,
      `${layer.keys.join("×")} keys` + (layer.note ? ` (of this page: ${layer.note})` : ""));
    for (let head = 0; head <= layer.heads; head++) objectPanels.push({ kind: "map", layer, head, ...panelIn(heads) });
  }
  for (const layer of objects.points) {
    decodePoints(layer);
    const { note, heads } = sectionIn(attended, layer.name, "points by level, the larger the more weight:");
    legend(note, layer);
    const panel = panelIn(heads);
    panel.canvas.width *= 2;
    panel.canvas.height *= 2;
    panel.canvas.closest("button").ariaPressed = "true";
    objectPanels.push({ kind: "points", layer, ...panel });
  }
}

function paintObject({ kind, layer, head, canvas, text }) {
  const object = objects.list[chosenObject], N = objects.list.length;
  if (kind === "points") {
    const points = pointsOf(layer, layer, chosenObject), [x, y, w, h] = layer.references[chosenObject];
    const painted = paintPoints(canvas, layer, points, () => {
      outline(canvas, object.box, "#06f", 2);
      if (w !== undefined) outline(canvas, [x - w / 2, y - h / 2, x + w / 2, y + h / 2], "#000", 1);
      mark(canvas, [y, x]);
    });
    text.textContent = `${painted} points, greatest weight ${percent(layer.peaks[chosenObject])} %; the cross is ` +
      `the query's reference point${w === undefined ? "" : ", the black frame its reference box"}`;
    return;
  }
  const [H, W] = kind === "mask" ? objects.masks.size : layer.keys, at = kind === "mask" ? 0 : head * N;
  const maps = kind === "mask" ? objects.masks.maps : layer.maps;
  const values = maps.subarray((at + chosenObject) * H * W, (at + chosenObject + 1) * H * W);
  heat(canvas, values, [H, W], kind === "mask" ? [1, 1] : data.share);
  outline(canvas, object.box, "#fff", 3);
  outline(canvas, object.box, "#06f", 1.5);
  text.textContent = kind === "mask" ? `${object.title}: bright where the pixel is part of it`
    : `${head ? `head ${head}` : "mean of all heads"}: max ${percent(layer.peaks[at + chosenObject])} % ` +
      `(uniform ${percent(layer.uniform[chosenObject])} %)`;
}

function showObject() {
  if (!objects) return;
  boxes.getContext("2d").drawImage(image, 0, 0, boxes.width, boxes.height);
  objects.list.forEach((object, n) => outline(boxes, object.box, "#fff8", n === chosenObject ? 0.1 : 2));
  outline(boxes, objects.list[chosenObject].box, "#fff", 6);
  outline(boxes, objects.list[chosenObject].box, "#06f", 3);
  objectSelect.value = chosenObject;
  chosenText.textContent = `Object ${chosenObject + 1} of ${objects.list.length}: ${objects.list[chosenObject].title}`;
  objectPanels.forEach(paintObject);
}

function chooseObject(n) {
  chosenObject = (n + objects.list.length) % objects.list.length;
  showObject();
}

// The smallest box around the point, else the one whose centre is nearest.
objectsPlace.addEventListener("pointerdown", event => {
  const frame = objectsPlace.getBoundingClientRect();
  const x = (event.clientX - frame.left) / frame.width, y = (event.clientY - frame.top) / frame.height;
  const cost = objects.list.map(({ box: [left, top, right, bottom] }) =>
    left <= x && x <= right && top <= y && y <= bottom ? (right - left) * (bottom - top)
      : 2 + Math.hypot(x - (left + right) / 2, y - (top + bottom) / 2));
  chooseObject(cost.indexOf(Math.min(...cost)));
});
onArrows(objectsPlace, ([y, x]) => chooseObject(chosenObject + y + x));
objectSelect.addEventListener("change", () => chooseObject(Number(objectSelect.value)));
