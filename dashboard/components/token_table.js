// Columns of token chips; a click sends the token id. Data goes in by textContent and attributes only, never as markup.

const HUES = [205, 28, 140, 285, 50, 340, 175, 95, 240, 5, 310, 70]; // tints of tokens that stand in several columns

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function chip(row, place) {
  const button = make("button", row.special ? "chip special" : "chip", row.text);
  button.type = "button";
  button.title = row.title;
  button.dataset.token = row.id;
  button.dataset.place = place;
  button.tabIndex = -1;
  if (row.tint !== null) {
    const turn = Math.floor(row.tint / HUES.length); // a second round of hues is paler
    button.classList.add("shared");
    button.style.setProperty("--tint", `hsl(${HUES[row.tint % HUES.length]} 65% 50% / ${turn ? 0.2 : 0.38})`);
  }
  return button;
}

function head(column, ranks) {
  const header = make("thead");
  const span = 1 + column.value_names.length + (ranks ? 1 : 0);
  const lines = [["title", column.title], ["subtitle", column.subtitle], ...column.notes.map((note) => ["note", note])];
  for (const [className, text] of lines) {
    if (!text) continue;
    const cell = make("th", className, text);
    cell.colSpan = span;
    cell.scope = "colgroup";
    header.append(make("tr"));
    header.lastChild.append(cell);
  }
  const names = make("tr", "names");
  if (ranks) names.append(make("th", "", "#"));
  names.append(make("th", "", "token"));
  for (const name of column.value_names) names.append(make("th", "value", name));
  header.append(names);
  return header;
}

function list(column, c, ranks) {
  const table = make("table", [column.chosen && "chosen", column.joined && "joined"].filter(Boolean).join(" "));
  if (column.color) table.style.setProperty("--bank", column.color);
  const body = make("tbody");
  column.rows.forEach((row, r) => {
    const line = make("tr");
    if (ranks) line.append(make("td", "rank", String(r + 1)));
    line.append(make("td"));
    line.lastChild.append(chip(row, `${c},${r}`));
    for (const value of row.values) line.append(make("td", "value", value));
    body.append(line);
  });
  if (!column.rows.length) {
    const cell = make("td", "empty", column.empty);
    cell.colSpan = 1 + column.value_names.length + (ranks ? 1 : 0);
    body.append(make("tr"));
    body.lastChild.append(cell);
  }
  table.append(head(column, ranks), body);
  return table;
}

export default function ({ data, parentElement, setTriggerValue }) {
  const root = parentElement.querySelector(".columns");
  const focused = parentElement.activeElement?.dataset?.place;
  root.setAttribute("role", "group");
  root.setAttribute("aria-label", data.label);
  root.replaceChildren(...data.columns.map((column, c) => list(column, c, c === 0)));

  const at = (c, r) => root.querySelector(`button[data-place="${c},${r}"]`);
  const first = root.querySelector("button");
  if (first) first.tabIndex = 0; // one stop for the Tab key; arrows move inside
  if (focused) at(...focused.split(","))?.focus();

  const light = (token) => {
    for (const button of root.querySelectorAll("button")) {
      button.classList.toggle("lit", token !== undefined && button.dataset.token === token);
    }
  };
  root.onmouseover = (event) => light(event.target.dataset?.token);
  root.onmouseleave = () => light(undefined);
  root.onfocusin = (event) => light(event.target.dataset?.token);
  root.onclick = (event) => {
    const token = event.target.dataset?.token;
    if (token !== undefined) setTriggerValue("pick", Number(token));
  };
  root.onkeydown = (event) => {
    const step = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] }[event.key];
    const place = event.target.dataset?.place;
    if (!step || !place) return;
    const [c, r] = place.split(",").map(Number);
    const next = at(c + step[0], r + step[1]);
    if (!next) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  };
}
