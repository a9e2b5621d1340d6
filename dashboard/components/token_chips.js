// Chips of a prompt's tokens; a click sends the position. Text goes in by textContent only.

export default function ({ data, parentElement, setTriggerValue }) {
  const group = parentElement.querySelector(".chips");
  group.replaceChildren(
    ...data.tokens.map((token, position) => {
      const chip = document.createElement("button");
      chip.type = "button";
      chip.setAttribute("role", "radio");
      chip.setAttribute("aria-checked", String(position === data.target));
      chip.className = token.special ? "special" : "";
      chip.textContent = token.shown;
      chip.title = `position ${position}, id ${token.id}`;
      chip.onclick = () => setTriggerValue("target", position);
      return chip;
    }),
  );
}
