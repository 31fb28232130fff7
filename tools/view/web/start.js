select.addEventListener("change", show);
opacity.addEventListener("input", () => { show(); showObject(); });
image.decode().then(() => { lookFrom(fromCls); showObject(); });
