// The server's API as the page uses it.

/** What went wrong, with the server's own words. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, key, body, { method = "POST", signal } = {}) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const sent = body === undefined ? {} : { method, body: JSON.stringify(body) };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(path, { ...sent, headers, signal });
  if (!response.ok) {
    const told = await response.json().catch(() => null);
    throw new ApiError(response.status, told?.error?.message ?? `the server answered ${response.status}`);
  }
  return response;
}

/** The models of the bundle. */
export async function models(key) {
  return (await (await ask("/v1/models", key)).json()).data;
}

/** Whether answers are learned from; `on` changes it. */
export async function learning(key, on) {
  const body = on === undefined ? undefined : { on };
  return (await (await ask("/learning", key, body, { method: "PUT" })).json()).on;
}

/** The chunks of a streamed answer. */
export async function* chat(key, request, signal) {
  const response = await ask("/v1/chat/completions", key, request, { signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the connection broke before the answer ended");
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}
