/** Talking to the server this page came from. Knows the key, JSON, errors and event streams. */

const KEY = "chunkcache.key";

/** An error that the server reported, or that kept it from being reached. */
export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export const setKey = (key) => sessionStorage.setItem(KEY, key);
export const forgetKey = () => sessionStorage.removeItem(KEY);

async function send(method, path, { body, signal } = {}) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key !== null) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), {
      method,
      headers,
      signal,
      body: body === undefined ? undefined : JSON.stringify(body),
      credentials: "omit",
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error instanceof TypeError && /header/i.test(error.message)) {
      throw new ApiError(401, "invalid_api_key", "the key holds characters that no key has");
    }
    throw new ApiError(0, "unreachable", "the server cannot be reached");
  }
  if (!response.ok) {
    const told = await response.json().catch(() => null);
    const { message, code } = told?.error ?? {};
    const error = new ApiError(
      response.status, code ?? "unknown", message ?? `the server answered ${response.status}`,
    );
    if (error.status === 401) document.dispatchEvent(new CustomEvent("key-wanted"));
    throw error;
  }
  return response;
}

/** The JSON that a route answers with. */
export async function call(method, path, options) {
  return (await send(method, path, options)).json();
}

/** The events of a streamed answer, as they come. */
export async function* events(path, body, signal) {
  const response = await send("POST", path, { body: { ...body, stream: true }, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError(0, "cut_off", "the answer was cut off");
    buffer += value;
    const frames = buffer.split("\n\n");
    buffer = frames.pop();
    for (const frame of frames) {
      if (!frame.startsWith("data: ")) continue;
      const data = frame.slice(6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.type === "error") {
        throw new ApiError(0, event.error.code, event.error.message);
      }
      yield event;
    }
  }
}
