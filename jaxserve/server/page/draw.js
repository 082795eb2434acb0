// Page map and plots on canvases, with colours of the style sheet.

export const FIRST_SLOT = 3;
const SHARED = 2;

// Return the colour of a slot. Neighbouring slots differ strongly in hue, with equal saturation.
export const colourOf = (slot, owner = "var(--owner)") =>
  `oklch(${owner} ${(slot * 137.5 + 235) % 360})`;

// Return a canvas context at the screen's resolution, and its colours by name.
function open(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas, scale = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d"), style = getComputedStyle(canvas);
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return {
    pen, width, height, scale, strong: style.color, faint: style.borderTopColor,
    soft: style.outlineColor, accent: style.caretColor, owner: style.getPropertyValue("--owner"),
  };
}

// Draw the cells of [code, count] runs in rows, as large as possible.
export function drawMap(canvas, runs) {
  const { pen, width, height, scale, strong, faint, soft, owner } = open(canvas);
  const total = runs.reduce((sum, count, index) => sum + (index % 2) * count, 0);
  if (!total || !width) return;
  // In screen pixels, so that all cells have one size.
  let dots = Math.min(16 * scale, Math.floor(scale * Math.sqrt((width * height) / total)));
  const fits = () => Math.floor((width * scale) / dots) * Math.floor((height * scale) / dots);
  while (dots > 1 && fits() < total) dots--;
  const size = dots / scale, columns = Math.floor((width * scale) / dots);
  const side = size > 3 ? size - 1 : size;
  let at = 0;
  for (let i = 0; i < runs.length; i += 2) {
    const code = runs[i], held = code >= FIRST_SLOT;
    pen.fillStyle = held ? colourOf(code - FIRST_SLOT, owner) : [faint, soft, strong][code];
    for (const end = at + runs[i + 1]; at < end; at++) {
      const x = (at % columns) * size, y = Math.floor(at / columns) * size;
      pen.fillRect(x, y, side, side);
      if (code === SHARED && side >= 4) pen.clearRect(x + side / 2 - 1, y + side / 2 - 1, 2, 2);
    }
  }
}

const nice = (value) => {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value) * power;
};

// Plot the values of the last `seconds`. Points are [time, value or null], the newest last.
export function drawPlot(canvas, points, seconds, name) {
  const { pen, width, height, strong, faint, accent } = open(canvas);
  const now = points.at(-1)?.[0] ?? 0, top = 14, bottom = height - 1.5;
  const most = nice(Math.max(...points.map((point) => point[1] ?? 0), 1e-3));
  const x = (time) => width - 3 - ((now - time) / seconds) * (width - 3);
  const y = (value) => bottom - (value / most) * (bottom - top);
  pen.fillStyle = faint;
  for (const line of [top, (top + bottom) / 2, bottom]) pen.fillRect(0, Math.round(line), width, 1);
  pen.fillStyle = strong;
  pen.font = "11px ui-sans-serif, system-ui, sans-serif";
  pen.fillText(name(most), 0, top - 4);
  pen.strokeStyle = pen.fillStyle = accent;
  pen.lineWidth = 1.5;
  pen.lineJoin = "round";
  pen.beginPath();
  let last = null;
  for (const [time, value] of points) {
    if (value !== null && last === null) pen.moveTo(x(time) - 1, y(value));
    if (value !== null) pen.lineTo(x(time), y(value));
    last = value;
  }
  pen.stroke();
  if (last !== null) {
    pen.beginPath();
    pen.arc(x(now), y(last), 2.5, 0, 7);
    pen.fill();
  }
}
