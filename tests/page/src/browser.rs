//! Chromium without a window, driven over its DevTools protocol: JSON messages that end with a zero byte, through two
//! pipes.

use std::io::{BufRead, BufReader, PipeWriter, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use harness::Result;
use serde_json::{Value, json};

/// Longest time for an answer, and for a condition of a page.
const PATIENCE: Duration = Duration::from_secs(15);

/// A browser with one page.
pub(super) struct Browser {
    child: Child,
    to: PipeWriter,
    from: Receiver<Value>,
    next: u64,
    session: String,
    /// Events that the browser has sent.
    events: Vec<Value>,
}

/// Makes the programs of a user's directory trust an authority, as a user does by importing its certificate.
pub(super) fn trust(home: &Path, authority: &Path) -> Result<()> {
    let dir = home.join(".pki/nssdb");
    std::fs::create_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let db = format!("sql:{}", dir.display());
    let run = |args: &[&std::ffi::OsStr]| {
        let o = Command::new("certutil").args(args).output().map_err(|e| format!("certutil: {e}"))?;
        if o.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&o.stderr).into_owned()) }
    };
    run(&["-d".as_ref(), db.as_ref(), "-N".as_ref(), "--empty-password".as_ref()])?;
    let add = ["-A", "-t", "C,,", "-n", "fleet", "-i"].map(AsRef::as_ref);
    run(&[&["-d".as_ref(), db.as_ref()], &add[..], &[authority.as_os_str()]].concat())
}

impl Browser {
    /// Starts a browser for a user's directory, with one empty page.
    pub fn start(home: &Path) -> Result<Browser> {
        let (stdin, to) = std::io::pipe().map_err(|e| e.to_string())?;
        let (answers, stdout) = std::io::pipe().map_err(|e| e.to_string())?;
        let log = std::fs::File::create(home.join("chromium.log")).map_err(|e| e.to_string())?;
        // It reads messages from descriptor 3 and writes them to descriptor 4.
        let script = "exec chromium --headless --remote-debugging-pipe --no-sandbox --no-first-run --disable-gpu \
                      --disable-dev-shm-usage --disable-background-networking --disable-component-update --disable-sync \
                      --hide-scrollbars --force-device-scale-factor=1 --font-render-hinting=none \
                      --user-data-dir=\"$HOME/profile\" about:blank 3<&0 4>&1 </dev/null >&2";
        let mut c = Command::new("sh");
        c.args(["-c", script]).env("HOME", home).env_remove("XDG_CONFIG_HOME").env_remove("DBUS_SESSION_BUS_ADDRESS");
        let child = c.stdin(stdin).stdout(stdout).stderr(log).spawn().map_err(|e| format!("chromium: {e}"))?;
        // Otherwise this process would hold the pipes' other ends.
        drop(c);
        let (send, from) = channel();
        std::thread::spawn(move || {
            let mut answers = BufReader::new(answers);
            let mut message = Vec::new();
            while answers.read_until(0, &mut message).is_ok_and(|n| n > 0) {
                message.pop();
                let Ok(value) = serde_json::from_slice(&message) else { break };
                if send.send(value).is_err() {
                    break;
                }
                message.clear();
            }
        });
        let mut b = Browser { child, to, from, next: 0, session: String::new(), events: Vec::new() };
        let pages = b.call("Target.getTargets", json!({}))?;
        let page = pages["targetInfos"].as_array().into_iter().flatten().find(|t| t["type"] == "page");
        let target = match page.map(|p| p["targetId"].clone()) {
            Some(target) => target,
            None => b.call("Target.createTarget", json!({ "url": "about:blank" }))?["targetId"].clone(),
        };
        b.attach(&target)?;
        Ok(b)
    }

    fn attach(&mut self, target: &Value) -> Result<()> {
        self.session.clear();
        let attached = self.call("Target.attachToTarget", json!({ "targetId": target, "flatten": true }))?;
        self.session = attached["sessionId"].as_str().ok_or("the page cannot be attached to")?.into();
        for domain in ["Page", "Runtime", "Log", "Network"] {
            self.call(&format!("{domain}.enable"), json!({}))?;
        }
        Ok(())
    }

    /// Opens a new page, which has no state of the previous one, so no token.
    pub fn open_another(&mut self) -> Result<()> {
        self.session.clear();
        let target = self.call("Target.createTarget", json!({ "url": "about:blank" }))?["targetId"].clone();
        self.attach(&target)
    }

    /// One call of the protocol.
    pub fn call(&mut self, method: &str, params: Value) -> Result<Value> {
        self.next += 1;
        let mut message = json!({ "id": self.next, "method": method, "params": params });
        if !self.session.is_empty() {
            message["sessionId"] = self.session.clone().into();
        }
        let mut bytes = message.to_string().into_bytes();
        bytes.push(0);
        self.to.write_all(&bytes).map_err(|e| format!("chromium has ended: {e}"))?;
        let until = Instant::now() + PATIENCE;
        loop {
            match self.from.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(m) if m["id"] == self.next => {
                    return match m["error"]["message"].as_str() {
                        Some(e) => Err(format!("{method}: {e}")),
                        None => Ok(m["result"].clone()),
                    };
                }
                Ok(m) if m["id"].is_null() => self.events.push(m),
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => return Err(format!("{method}: no answer in {PATIENCE:?}")),
                Err(RecvTimeoutError::Disconnected) => return Err("chromium has ended".into()),
            }
        }
    }

    /// Events with these names that arrived since the last call.
    pub fn events(&mut self, names: &[&str]) -> Vec<Value> {
        while let Ok(m) = self.from.try_recv() {
            self.events.push(m);
        }
        let of = |m: &Value| m["method"].as_str().is_some_and(|n| names.contains(&n));
        let (those, others) = std::mem::take(&mut self.events).into_iter().partition(of);
        self.events = others;
        those
    }

    /// Opens an address and waits until it is loaded.
    pub fn go(&mut self, url: &str) -> Result<()> {
        let went = self.call("Page.navigate", json!({ "url": url }))?;
        match went["errorText"].as_str() {
            Some(e) if !e.is_empty() => Err(format!("{url}: {e}")),
            _ => self.wait("document.readyState === 'complete'", "the page is not loaded"),
        }
    }

    /// Loads the page again.
    pub fn reload(&mut self) -> Result<()> {
        self.value("globalThis.before = true")?;
        self.call("Page.reload", json!({}))?;
        self.wait("!globalThis.before && document.readyState === 'complete'", "the page is not loaded again")
    }

    /// The value of an expression in the page.
    pub fn value(&mut self, expression: &str) -> Result<Value> {
        let params = json!({ "expression": expression, "awaitPromise": true, "returnByValue": true });
        let said = self.call("Runtime.evaluate", params)?;
        match said.get("exceptionDetails") {
            Some(e) => Err(format!("{expression}: {}", e["exception"]["description"])),
            None => Ok(said["result"]["value"].clone()),
        }
    }

    /// The value of an expression, a text.
    pub fn text(&mut self, expression: &str) -> Result<String> {
        let value = self.value(expression)?;
        value.as_str().map(String::from).ok_or_else(|| format!("{expression} is {value}"))
    }

    /// Waits until an expression is true.
    pub fn wait(&mut self, expression: &str, otherwise: &str) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        loop {
            match self.value(expression) {
                Ok(value) if value == true => return Ok(()),
                Ok(_) => {}
                // The page is being loaded.
                Err(e) if e.contains("navigated") || e.contains("context") => {}
                Err(e) => return Err(e),
            }
            if Instant::now() > until {
                let shown = self.text("document.body.innerText")?;
                return Err(format!("{otherwise}: not `{expression}` in {PATIENCE:?}. The page shows:\n{shown}"));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until the page shows a text.
    pub fn shows(&mut self, text: &str) -> Result<()> {
        let quoted = Value::from(text).to_string();
        self.wait(&format!("document.body.innerText.includes({quoted})"), &format!("`{text}` is not shown"))
    }

    /// Presses a key: a character, or a name like `Tab`.
    pub fn key(&mut self, key: &str) -> Result<()> {
        let code = match key {
            "Tab" => 9,
            "Enter" => 13,
            "Escape" => 27,
            "Backspace" => 8,
            _ => 0,
        };
        let mut event = json!({ "type": "keyDown", "key": key, "windowsVirtualKeyCode": code });
        if code == 0 || key == "Enter" {
            event["text"] = if key == "Enter" { "\r" } else { key }.into();
        }
        self.call("Input.dispatchKeyEvent", event)?;
        let event = json!({ "type": "keyUp", "key": key, "windowsVirtualKeyCode": code });
        self.call("Input.dispatchKeyEvent", event).map(drop)
    }

    /// Types a text.
    pub fn write(&mut self, text: &str) -> Result<()> {
        self.call("Input.insertText", json!({ "text": text })).map(drop)
    }

    /// Presses and releases the mouse in the middle of an element.
    pub fn click(&mut self, selector: &str) -> Result<()> {
        let quoted = Value::from(selector).to_string();
        let place = format!(
            "(() => {{ const e = document.querySelector({quoted}); if (!e) return null; e.scrollIntoView({{ block: 'nearest', \
             inline: 'nearest' }}); const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; }})()"
        );
        let at = self.value(&place)?;
        let (Some(x), Some(y)) = (at[0].as_f64(), at[1].as_f64()) else {
            return Err(format!("there is no {selector}"));
        };
        for kind in ["mouseMoved", "mousePressed", "mouseReleased"] {
            let event = json!({ "type": kind, "x": x, "y": y, "button": "left", "clickCount": 1 });
            self.call("Input.dispatchMouseEvent", event)?;
        }
        Ok(())
    }

    /// Resizes the window. Narrow windows behave as on telephones.
    pub fn resize(&mut self, width: u32, height: u32) -> Result<()> {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500 });
        self.call("Emulation.setDeviceMetricsOverride", size).map(drop)
    }

    /// Sets the user's colour scheme, `dark` or `light`, and a preference for no animation.
    pub fn scheme(&mut self, scheme: &str) -> Result<()> {
        let features = json!([
            { "name": "prefers-color-scheme", "value": scheme },
            { "name": "prefers-reduced-motion", "value": "reduce" }
        ]);
        self.call("Emulation.setEmulatedMedia", json!({ "features": features })).map(drop)
    }

    /// Saves a picture of the window.
    pub fn picture(&mut self, file: &PathBuf) -> Result<()> {
        let shot = self.call("Page.captureScreenshot", json!({ "format": "png" }))?;
        let bytes =
            STANDARD.decode(shot["data"].as_str().unwrap_or_default()).map_err(|e| format!("the picture: {e}"))?;
        std::fs::write(file, bytes).map_err(|e| format!("{}: {e}", file.display()))
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        self.session.clear();
        let _ = self.call("Browser.close", json!({}));
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
