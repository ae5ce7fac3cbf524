// Light or dark: follows the system until the user chooses.

const KEY = "m2forge-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");

function chosen() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null;
  }
}

function apply() {
  document.documentElement.dataset.theme = chosen() || (dark.matches ? "dark" : "light");
  document.dispatchEvent(new Event("themechange"));
}

export function setUpTheme(button) {
  apply();
  dark.addEventListener("change", apply);
  button.addEventListener("click", toggleTheme);
}

export function toggleTheme() {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try {
    localStorage.setItem(KEY, next);
  } catch {
    // Without storage the choice lasts until the page is closed.
  }
  document.documentElement.dataset.theme = next;
  document.dispatchEvent(new Event("themechange"));
}
