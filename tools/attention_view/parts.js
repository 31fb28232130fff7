// A switch between what all terms of the logits attend to, and what each would alone.
const partSelect = document.getElementById("part");
const partNames = [...new Set(data.layers.flatMap(layer => Object.keys(layer.parts || {})))];
partNames.forEach(name => partSelect.add(new Option(name, name)));
document.getElementById("partLabel").hidden = document.getElementById("aboutParts").hidden = !partNames.length;

// What is chosen of a layer: itself, or the part; null where it has none of this name.
function partOf(layer) {
  return partSelect.value === "" ? layer : (layer.parts || {})[partSelect.value] || null;
}
partSelect.addEventListener("change", () => show());
