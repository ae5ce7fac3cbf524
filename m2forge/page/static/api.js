// Requests to the server, and polling while the page is visible.

export class Refused extends Error {
  constructor(message, reason, status) {
    super(message);
    Object.assign(this, { reason, status });
  }
}

export async function ask(path, parameters = {}, signal = undefined) {
  const given = Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const query = new URLSearchParams(given).toString();
  const response = await fetch(query ? `${path}?${query}` : path, { signal });
  let body = null;
  try {
    body = await response.json();
  } catch {
    throw new Refused(`the answer to ${path} could not be read`, "network", response.status);
  }
  if (!response.ok) throw new Refused(body.error || response.statusText, body.reason || "", response.status);
  return body;
}

// Calls `work` every `seconds` while the page is visible, the next call only when the one before has ended.
export function repeat(work, seconds) {
  let [timer, isOver] = [null, false];
  const run = async () => {
    if (!document.hidden) await work();
    if (!isOver) timer = setTimeout(run, 1000 * seconds);
  };
  const wake = () => {
    if (document.hidden || isOver) return;
    clearTimeout(timer);
    timer = setTimeout(run, 0);
  };
  document.addEventListener("visibilitychange", wake);
  run();
  return () => {
    isOver = true;
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", wake);
  };
}
