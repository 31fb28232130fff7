// The cls token of a vision transformer as the query, until a pixel is chosen.
const clsButton = element("cls");
clsButton.hidden = element("aboutCls").hidden = !fromCls;

function lookFrom(cls) {
  fromCls = cls;
  cross.hidden = cls;
  clsButton.ariaPressed = String(cls);
  show();
}
clsButton.addEventListener("click", () => lookFrom(!fromCls));
