// The centre's HTTP interface: one stream of all that there is and of each change, as JSON.

const KEY = "unirdma-token";
export const token = {
  get: () => sessionStorage.getItem(KEY),
  set: (text) => sessionStorage.setItem(KEY, text),
  drop: () => sessionStorage.removeItem(KEY),
};

export class Refused extends Error {}

async function call(path, signal) {
  const response = await fetch(path, { signal, headers: { authorization: `Bearer ${token.get()}` } });
  if (response.ok) return response;
  const text = await response.text();
  let why = text;
  try { why = JSON.parse(text).error ?? text; } catch { /* It is no JSON: the text is what there is. */ }
  why = why.trim() || `the centre answers ${response.status}`;
  throw response.status === 401 || response.status === 403 ? new Refused(why) : new Error(why);
}

// Calls `on` with each message of the stream (server-sent events, whose data is a line of JSON) until it ends or `signal` aborts it.
export async function watch(on, signal) {
  const response = await call("/api/v1/watch", signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const message = JSON.parse(line.slice("data:".length));
      if (message.error !== undefined) throw new Error(message.error);
      on(message);
    }
  }
}
