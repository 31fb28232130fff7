// A switch between the attention of all terms of the logits and that of each term alone.
const partSelect = element("part");
const partNames = [...new Set(data.layers.flatMap(layer => Object.keys(layer.parts || {})))];
partNames.forEach(name => partSelect.add(new Option(name, name)));
element("partLabel").hidden = element("aboutParts").hidden = !partNames.length;

// The chosen view of a layer: itself, or a part; null if it has no part of this name.
function partOf(layer) {
  return partSelect.value === "" ? layer : (layer.parts || {})[partSelect.value] || null;
}
partSelect.addEventListener("change", () => show());
