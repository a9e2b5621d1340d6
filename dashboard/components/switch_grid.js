// A grid of switches. The browser shows a click at once; the server hears the whole set of switches that are off,
// with a turn number, so that an answer to an older click never overwrites a newer one.

const turns = new WeakMap(); // table element -> number of the last click

export default function ({ data, parentElement, setStateValue }) {
  const table = parentElement.querySelector("table");
  const legend = parentElement.querySelector(".legend");
  if (data.turn < (turns.get(table) ?? 0)) return;
  const name = (layer, bank) => `${layer}.${bank}`;
  const off = new Set(data.off.map(([layer, bank]) => name(layer, bank)));
  const layers = [...Array(data.layers).keys()].reverse(); // layer 0 at the bottom: the stream rises
  const banks = [...Array(data.banks).keys()];
  const buttons = []; // [button, cells it switches]

  const paint = () => {
    for (const [button, cells, label] of buttons) {
      const on = cells.filter((cell) => !off.has(cell)).length;
      const state = on === cells.length ? "on" : on === 0 ? "off" : "partly on";
      button.dataset.state = state;
      button.setAttribute("aria-pressed", state === "on" ? "true" : state === "off" ? "false" : "mixed");
      button.title = `${label}: ${state}`;
      button.setAttribute("aria-label", button.title);
    }
    legend.textContent = `${data.layers * data.banks - off.size} of ${data.layers * data.banks} on`;
  };
  const flip = (cells) => {
    const switchOff = cells.some((cell) => !off.has(cell));
    for (const cell of cells) switchOff ? off.add(cell) : off.delete(cell);
    paint();
    const turn = (turns.get(table) ?? data.turn) + 1;
    turns.set(table, turn);
    setStateValue("switches", { off: [...off].map((cell) => cell.split(".").map(Number)), turn });
  };
  const button = (cells, label, kind) => {
    const element = document.createElement("button");
    element.type = "button";
    element.className = kind;
    element.onclick = () => flip(cells);
    buttons.push([element, cells, label]);
    const holder = document.createElement("td");
    holder.append(element);
    return holder;
  };
  const heading = (text) => {
    const element = document.createElement("th");
    element.textContent = text;
    return element;
  };
  const row = (...cells) => {
    const element = document.createElement("tr");
    element.append(...cells);
    return element;
  };

  const all = layers.flatMap((layer) => banks.map((bank) => name(layer, bank)));
  table.replaceChildren(
    row(heading("bank"), ...banks.map(heading), heading("all")),
    ...layers.map((layer) => {
      const cells = banks.map((bank) => name(layer, bank));
      return row(
        heading(`layer ${layer}`),
        ...banks.map((bank) => button([name(layer, bank)], `bank ${bank} in layer ${layer}`, "one")),
        button(cells, `all banks in layer ${layer}`, "many"),
      );
    }),
    row(
      heading("all"),
      ...banks.map((bank) => button(layers.map((layer) => name(layer, bank)), `bank ${bank} in all layers`, "many")),
      button(all, "the whole memory", "many"),
    ),
  );
  paint();
}
