// The cls token of a vision transformer as the query, until a pixel is chosen.
const clsButton = element("cls");
clsButton.hidden = element("aboutCls").hidden = !fromCls;

function lookFrom(cls) {
  fromCls = cls;
  cross.hidden = cls;
  clsButton.setAttribute("aria-pressed", String(cls));
  show();
}
clsButton.addEventListener("click", () => lookFrom(clsButton.getAttribute("aria-pressed") !== "true"));
