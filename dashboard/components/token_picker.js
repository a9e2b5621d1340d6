// Sends the query while a person types, shows the server's hits, sends the picked token id.
// All text goes in by textContent: a token can never be read as markup.

const TYPING_PAUSE_MS = 120;

export default function ({ data, parentElement, setStateValue, setTriggerValue }) {
  const input = parentElement.querySelector("input");
  const list = parentElement.querySelector("ul");
  let active = 0;
  let timer = null;

  const items = () => [...list.querySelectorAll("li[role=option]")];
  const mark = (index) => {
    const all = items();
    active = Math.max(0, Math.min(index, all.length - 1));
    all.forEach((item, i) => item.setAttribute("aria-selected", String(i === active)));
    all[active]?.scrollIntoView({ block: "nearest" });
  };
  const close = () => {
    clearTimeout(timer);
    input.value = "";
    list.replaceChildren();
    input.setAttribute("aria-expanded", "false");
    setStateValue("query", "");
  };
  const pick = (id) => {
    close();
    setTriggerValue("pick", id);
  };

  const show = () => {
    // The list belongs to the query that the server saw; an answer to an older one is not shown.
    if (input.value !== data.query) return;
    list.replaceChildren(
      ...data.hits.map((hit) => {
        const item = document.createElement("li");
        item.setAttribute("role", "option");
        item.dataset.id = hit.id;
        const chip = document.createElement("code");
        chip.textContent = hit.shown;
        const note = document.createElement("small");
        note.textContent = hit.note;
        item.append(chip, note);
        item.onmousedown = (event) => {
          event.preventDefault();
          pick(hit.id);
        };
        return item;
      }),
    );
    if (input.value && data.hits.length === 0) {
      const none = document.createElement("li");
      none.className = "none";
      none.textContent = "no token contains this";
      list.append(none);
    }
    input.setAttribute("aria-expanded", String(data.hits.length > 0));
    mark(0);
  };

  input.oninput = () => {
    clearTimeout(timer);
    timer = setTimeout(() => setStateValue("query", input.value), TYPING_PAUSE_MS);
  };
  input.onkeydown = (event) => {
    if (event.key === "ArrowDown") mark(active + 1);
    else if (event.key === "ArrowUp") mark(active - 1);
    else if (event.key === "Escape") close();
    else if (event.key === "Enter" && input.value === data.query && items()[active]) {
      pick(Number(items()[active].dataset.id));
    } else return;
    event.preventDefault();
  };
  const slash = (event) => {
    const typing = event.composedPath()[0]?.closest?.("input, textarea, [contenteditable]");
    if (event.key === "/" && !typing) {
      event.preventDefault();
      input.focus();
    }
  };
  document.addEventListener("keydown", slash);
  show();
  return () => {
    clearTimeout(timer);
    document.removeEventListener("keydown", slash);
  };
}
