// Numbers and times as people read them. Everything that cannot be told is a dash.

const DASH = "–";

export function count(value: number | null | undefined): string {
  return value == null ? DASH : value.toLocaleString("en-US");
}

/** Four significant digits, without an exponent where it fits. */
export function number(value: number | null | undefined): string {
  if (value == null) return DASH;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return Number(value.toPrecision(4)).toString();
}

export function fixed(value: number | null | undefined, digits: number): string {
  return value == null ? DASH : value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Four digits behind the point, so that rows align; another form for what would be nothing but zeros. */
export function loss(value: number | null | undefined): string {
  return value != null && value !== 0 && Math.abs(value) < 1e-3 ? number(value) : fixed(value, 4);
}

export function percent(share: number | null | undefined, digits = 1): string {
  return share == null ? DASH : `${(100 * share).toFixed(digits)} %`;
}

export function short(value: number | null | undefined): string {
  if (value == null) return DASH;
  for (const [size, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]] as const) {
    if (value >= size) return `${(value / size).toFixed(value >= 100 * size ? 0 : 1)}${letter}`;
  }
  return value >= 100 ? value.toFixed(0) : Number(value.toPrecision(3)).toString();
}

export function bytes(value: number | null | undefined): string {
  if (value == null) return DASH;
  for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]] as const) {
    if (value >= size) return `${(value / size).toFixed(1)} ${unit}`;
  }
  return `${value} B`;
}

/** hh:mm:ss, with days in front of long ones. */
export function duration(seconds: number | null | undefined): string {
  if (seconds == null) return DASH;
  const whole = Math.max(0, Math.round(seconds));
  const days = Math.floor(whole / 86400);
  const clock = [Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60, whole % 60]
    .map((part) => String(part).padStart(2, "0"))
    .join(":");
  return days ? `${days}d ${clock}` : clock;
}

export function seconds(value: number | null | undefined): string {
  if (value == null) return DASH;
  if (value >= 100) return `${Math.round(value).toLocaleString("en-US")} s`;
  if (value >= 1) return `${value.toFixed(1)} s`;
  return value >= 1e-3 ? `${(value * 1e3).toFixed(value >= 0.1 ? 0 : 1)} ms` : `${(value * 1e6).toFixed(0)} µs`;
}

export function clock(wall: number): string {
  return new Date(wall * 1000).toLocaleTimeString("en-GB");
}

export function when(wall: number | null | undefined): string {
  if (wall == null) return DASH;
  const date = new Date(wall * 1000);
  const day = date.toDateString() === new Date().toDateString() ? "" : `${date.toLocaleDateString("en-CA")} `;
  return day + date.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
}

/** A value of a recipe. */
export function setting(value: unknown): string {
  if (value === null || value === undefined) return DASH;
  return typeof value === "string" ? value : JSON.stringify(value);
}
