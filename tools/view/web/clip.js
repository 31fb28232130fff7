// The frames of a clip lie side by side, in data.frames rows and columns of them.
element("aboutClip").hidden = !data.frames;

// A place on a map as text; for a clip with its frame, counted from 0.
function wordsOf([y, x], size, write) {
  if (!data.frames) return write(y, x);
  const [h, w] = size.map((n, axis) => n / data.frames[axis]);
  const frame = Math.floor(y / h) * data.frames[1] + Math.floor(x / w);
  return `frame ${frame}, ${write(y % h, x % w)}`;
}
