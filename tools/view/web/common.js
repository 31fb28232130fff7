"use strict";
const data = @DATA@;
const element = id => document.getElementById(id);
const bytes = text => Uint8Array.from(atob(text), c => c.charCodeAt(0));
const floats = text => new Float32Array(bytes(text).buffer);
const shorts = text => new Uint16Array(bytes(text).buffer);
const colours = bytes(data.colours);
// Two digits, without an exponent for 100 %.
const percent = share => share < 0.0995 ? (100 * share).toPrecision(2) : String(Math.round(100 * share));
const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
// Calls `act` with the direction of an arrow key.
function onArrows(target, act) {
  target.addEventListener("keydown", event => {
    const step = ARROWS[event.key];
    if (!step) return;
    event.preventDefault();
    act(step, event);
  });
}
// Creates an element with properties and contents.
function create(tag, properties, ...contents) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...contents);
  return made;
}
// Draws a rectangle of left, top, right and bottom, relative to the canvas's size.
function outline(canvas, [left, top, right, bottom], colour, width) {
  const context = canvas.getContext("2d"), { width: W, height: H } = canvas;
  Object.assign(context, { strokeStyle: colour, lineWidth: width });
  context.strokeRect(left * W, top * H, (right - left) * W, (bottom - top) * H);
}
// Writes bytes of the colour table as pixels, opaque.
function paintBytes(canvas, values, width, height) {
  const pixels = new ImageData(width, height);
  values.forEach((value, n) => {
    pixels.data.set(colours.subarray(3 * value, 3 * value + 3), 4 * n);
    pixels.data[4 * n + 3] = 255;
  });
  Object.assign(canvas, { width, height });
  canvas.getContext("2d").putImageData(pixels, 0, 0);
}
