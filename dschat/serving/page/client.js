"use strict";
// Requests to the server.
async function ask(path, body, signal) {
  const headers = {"Content-Type": "application/json"}, key = document.getElementById("key").value;
  if (key) headers.Authorization = "Bearer " + key;
  const text = JSON.stringify(body);
  const options = body === undefined ? {headers} : {method: "POST", headers, body: text, signal};
  const response = await fetch(path, options).catch(error => {
    throw error.name === "AbortError" ? error : new Error("the server does not answer; is it running?");
  });
  if (response.ok) return response;
  let message = "the server answers with status " + response.status;
  try { message = (await response.json()).error.message; } catch { /* not a body of ours */ }
  if (response.status === 401) message += "; the field for it is under Settings";
  if (response.status === 413) {
    const size = Math.ceil(new Blob([text]).size / 1024);
    message = `the message is too long: with the turns before it, it has ${size} KiB, more than the server takes. ` +
      `Shorten it, or delete turns before it. (${message})`;
  }
  throw new Error(message);
}

// The events of a streamed answer.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) throw new Error("the connection ended before the answer did");
    held += value;
    const lines = held.split("\n\n");
    held = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      yield JSON.parse(line.slice(6));
    }
  }
}
