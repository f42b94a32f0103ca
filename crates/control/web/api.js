// The centre's HTTP interface: one stream of all that there is and of each change, as JSON.

const KEY = "unirdma-token";
export const token = {
  get: () => sessionStorage.getItem(KEY),
  set: (text) => sessionStorage.setItem(KEY, text),
  drop: () => sessionStorage.removeItem(KEY),
  // What the token is called: the part that is no secret.
  id: () => token.get()?.split(".")[0] ?? "",
};

// The centre says something every 5 s. One that has said nothing for so long is gone.
const SILENCE = 16000;

export class Refused extends Error {}

async function call(path, signal) {
  // Other characters than these no header can have, and no token has.
  const sent = token.get().replace(/[^\x21-\x7e]/g, "");
  const response = await fetch(path, { signal, headers: { authorization: `Bearer ${sent}` } });
  if (response.ok) return response;
  const text = await response.text();
  let why = text;
  try { why = JSON.parse(text).error ?? text; } catch { /* It is no JSON: the text is what there is. */ }
  why = why.trim() || `the centre answers ${response.status}`;
  throw response.status === 401 || response.status === 403 ? new Refused(why) : new Error(why);
}

// Calls `on` with each message of the stream (server-sent events, whose data is a line of JSON) until it ends or `signal` aborts it.
export async function watch(on, signal) {
  const silence = new AbortController();
  let timer;
  const heard = () => {
    clearTimeout(timer);
    timer = setTimeout(() => silence.abort(new Error("it is silent")), SILENCE);
  };
  try {
    heard();
    const response = await call("/api/v1/watch", AbortSignal.any([signal, silence.signal]));
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      heard();
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const message = JSON.parse(line.slice("data:".length));
        if (message.error !== undefined) throw new Error(message.error);
        on(message);
      }
    }
  } finally {
    clearTimeout(timer);
  }
}
