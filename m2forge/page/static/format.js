// Human-readable numbers.

const GROUPED = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6) return `${(value / 1e6).toFixed(size >= 1e7 ? 1 : 2)}M`;
  if (size >= 1000) return GROUPED.format(value);
  if (Number.isInteger(value)) return String(value);
  if (size >= 100) return value.toFixed(0);
  if (size >= 1) return value.toFixed(2);
  if (size >= 0.001) return String(Number(value.toPrecision(3)));
  return value.toExponential(1);
}

export function count(value) {
  return value === null || value === undefined ? "–" : GROUPED.format(value);
}

export function percent(value) {
  if (value === null || value === undefined) return "–";
  return `${(100 * value).toFixed(Math.abs(value) < 0.0995 && value !== 0 ? 1 : 0)}%`;
}

export function signed(value) {
  return value > 0 ? `+${number(value)}` : number(value).replace("-", "−");
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 90) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

export function words(name) {
  return name.replaceAll("_", " ");
}
