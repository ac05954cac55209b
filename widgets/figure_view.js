// Draws model's figure with plotly, as wide as the cell, and says what it has drawn.

// plotly's source is a script that gives itself to `module.exports`; as a module it leaves no global behind.
async function evaluate(source) {
  const text = `const module = { exports: {} };\n${source}\nexport default module.exports;`;
  const url = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
  try {
    return (await import(url)).default;
  } finally {
    URL.revokeObjectURL(url);
  }
}

// One plotly for the page: modules of two widgets share nothing but this.
async function plotly(model) {
  const id = model.get("_plotly").replace("IPY_MODEL_", "");
  const found = (globalThis.slidedp ??= {});
  return (found[id] ??= model.widget_manager.get_model(id).then((shared) => evaluate(shared.get("source"))));
}

async function render({ model, el }) {
  // Its place is kept from the start, so that what lies below does not jump.
  const figure = () => {
    const { number, json } = model.get("_content");
    const { data = [], layout = {} } = JSON.parse(json);
    el.style.minHeight = `${layout.height ?? 0}px`;
    return { number, data, layout };
  };
  figure();
  const Plotly = await plotly(model);
  let frame = null;

  const zoomed = () => {
    const range = el.layout.xaxis?.range;
    if (typeof range?.[0] !== "number") return;
    model.set("x_range", [...range]);
    model.save_changes();
  };
  const draw = () => {
    frame = null;
    if (!el.clientWidth) return; // not in the page yet: the figure would be 700 pixels wide
    const { number, data, layout } = figure();
    const first = !el.on;
    Plotly.react(el, data, { uirevision: "kept", ...layout, autosize: true });
    if (first) el.on("plotly_relayout", zoomed);
    model.send({ drawn: number });
  };
  // Of what comes between two frames only the last is drawn; while the tab is hidden nothing is.
  const schedule = () => { frame ??= requestAnimationFrame(draw); };
  const observer = new ResizeObserver(schedule);
  observer.observe(el);
  model.on("change:_content", schedule);
  return () => {
    observer.disconnect();
    cancelAnimationFrame(frame);
    Plotly.purge(el);
  };
}

export default { render };
