// A strip of cells, one per layer. Dragging paints; one change is sent when the button goes up.
function render({ model, el }) {
  const colors = model.get("_colors");
  const strip = document.createElement("div");
  const palette = document.createElement("div");
  strip.style.cssText = "display:flex;flex-wrap:wrap;gap:2px;user-select:none;touch-action:none;max-width:900px";
  palette.style.cssText = "display:flex;gap:6px;margin:4px 0;align-items:center;font-size:12px";
  el.append(palette, strip);
  let painted = null;

  const ink = (mode) => (mode === "keep" ? "#fff" : "#000");
  const look = (cell, mode) => {
    cell.style.background = colors[mode];
    cell.style.color = ink(mode);
    cell.textContent = mode[0];
  };

  function drawPalette() {
    palette.replaceChildren("paint: ");
    for (const mode of Object.keys(colors)) {
      const button = document.createElement("button");
      const on = model.get("brush") === mode;
      button.className = "brush-" + mode;
      button.style.cssText = `border:2px solid ${on ? "#000" : "transparent"};background:${colors[mode]};` +
        `color:${ink(mode)};border-radius:3px;padding:2px 8px;cursor:pointer`;
      button.textContent = mode;
      button.title = `paint ${mode}; double click: all layers`;
      button.onclick = () => { model.set("brush", mode); model.save_changes(); };
      button.ondblclick = () => { model.set("modes", model.get("modes").map(() => mode)); model.save_changes(); };
      palette.append(button);
    }
  }

  function drawStrip() {
    strip.replaceChildren(...model.get("modes").map((mode, layer) => {
      const cell = document.createElement("div");
      cell.style.cssText = "width:20px;height:26px;line-height:26px;text-align:center;font-size:11px;" +
        "cursor:crosshair;border-radius:2px";
      cell.dataset.layer = layer;
      cell.title = `layer ${layer}: ${mode}`;
      cell.tabIndex = 0;
      cell.onkeydown = (event) => { if (event.key === "Enter") { begin(layer); end(); } };
      look(cell, mode);
      return cell;
    }));
  }

  const paint = (layer) => {
    painted[layer] = model.get("brush");
    look(strip.children[layer], painted[layer]);
  };
  const begin = (layer) => { painted = [...model.get("modes")]; paint(layer); };
  const end = () => {
    if (painted === null) return;
    model.set("modes", painted);
    model.save_changes();
    painted = null;
  };
  const under = (event) => document.elementFromPoint(event.clientX, event.clientY)?.dataset.layer;

  strip.onpointerdown = (event) => { if (event.target.dataset.layer) begin(+event.target.dataset.layer); };
  strip.onpointermove = (event) => {
    const layer = painted === null ? undefined : under(event);
    if (layer !== undefined && strip.contains(document.elementFromPoint(event.clientX, event.clientY))) paint(+layer);
  };
  window.addEventListener("pointerup", end);
  model.on("change:brush", drawPalette);
  model.on("change:modes", drawStrip);
  drawPalette();
  drawStrip();
  return () => window.removeEventListener("pointerup", end);
}

export default { render };
