//! Drives a headless Chromium through its debugging protocol: JSON messages, each terminated by a zero
//! byte, on its file descriptors 3 and 4. The tested program knows nothing of it.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    time::{Duration, Instant, SystemTime},
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::{Value, json};

use crate::wait::pace;

/// Time limit for a response on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// A browser with one tab.
pub struct Browser {
    child: Child,
    stdin: ChildStdin,
    messages: Receiver<Value>,
    next: u64,
    session: String,
    /// Errors of the console, including violations of the page's security policy.
    pub page_errors: Vec<String>,
    _profile: tempfile::TempDir,
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Size and colour scheme of the tab.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    pub width: u32,
    pub height: u32,
    pub dark: bool,
}

impl Browser {
    /// Starts a browser; says why when there is none.
    pub fn start() -> Option<Self> {
        let program = std::env::var_os("KILO_CHROMIUM").map(PathBuf::from).or_else(|| find("chromium"));
        let Some(program) = program else {
            println!("kilo-skip: there is no chromium; `apt-get install chromium` gets it");
            return None;
        };
        let profile = tempfile::tempdir().unwrap();
        // Its sandbox does not work as root; the pages it shows are our own.
        let mut child = Command::new("sh")
            .args(["-c", "exec \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>&1", "sh"])
            .arg(program)
            .args([
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
            ])
            .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
            .args(["--remote-debugging-pipe", "--force-color-profile=srgb", "--lang=en-US"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .arg("about:blank")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let (sender, messages) = channel();
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            while stdout.read_until(0, &mut bytes).is_ok_and(|read| read > 0) {
                bytes.pop();
                if sender.send(serde_json::from_slice(&bytes).unwrap_or_default()).is_err() {
                    return;
                }
                bytes.clear();
            }
        });
        let mut browser = Self {
            child,
            stdin,
            messages,
            next: 0,
            session: String::new(),
            page_errors: Vec::new(),
            _profile: profile,
        };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}));
        let attached = json!({"targetId": target["targetId"], "flatten": true});
        browser.session = text(&browser.call("Target.attachToTarget", attached)["sessionId"]);
        for domain in ["Page", "Runtime", "Log"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        Some(browser)
    }

    /// Calls a method and returns its result; panics on an error.
    pub fn call(&mut self, method: &str, parameters: impl Into<Value>) -> Value {
        self.try_call(method, parameters).unwrap_or_else(|error| panic!("{method}: {error}"))
    }

    /// Calls a method that may fail.
    fn try_call(&mut self, method: &str, parameters: impl Into<Value>) -> Result<Value, Value> {
        self.next += 1;
        let id = self.next;
        let mut message = json!({"id": id, "method": method, "params": parameters.into()});
        if !self.session.is_empty() {
            message["sessionId"] = json!(self.session);
        }
        let mut bytes = serde_json::to_vec(&message).unwrap();
        bytes.push(0);
        self.stdin.write_all(&bytes).unwrap();
        let until = Instant::now() + LIMIT;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.messages.recv_timeout(left) {
                Ok(answer) if answer["id"] == json!(id) => {
                    let error = &answer["error"];
                    return if error.is_null() { Ok(answer["result"].clone()) } else { Err(error.clone()) };
                }
                Ok(event) => self.note(&event),
                Err(RecvTimeoutError::Timeout) => panic!("{method} is not answered within {LIMIT:?}"),
                Err(RecvTimeoutError::Disconnected) => panic!("the browser has ended during {method}"),
            }
        }
    }

    fn note(&mut self, event: &Value) {
        let parameters = &event["params"];
        match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => {
                self.page_errors.push(parameters["exceptionDetails"].to_string());
            }
            Some("Runtime.consoleAPICalled") if parameters["type"] == "error" => {
                self.page_errors.push(parameters["args"].to_string());
            }
            Some("Log.entryAdded") if parameters["entry"]["level"] == "error" => {
                self.page_errors.push(parameters["entry"].to_string());
            }
            _ => {}
        }
    }

    /// Sets the tab's size and colour scheme.
    pub fn look(&mut self, look: Look) {
        let Look { width, height, dark } = look;
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600});
        self.call("Emulation.setDeviceMetricsOverride", size);
        let scheme = if dark { "dark" } else { "light" };
        let media = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.call("Emulation.setEmulatedMedia", media);
    }

    /// Navigates to a page.
    pub fn open(&mut self, url: &str) {
        let gone = self.call("Page.navigate", json!({"url": url}));
        assert!(gone["errorText"].is_null(), "{url}: {}", gone["errorText"]);
    }

    /// Value of an expression, awaited when it is a promise.
    pub fn value(&mut self, expression: &str) -> Value {
        let value = self.try_value(expression);
        value.unwrap_or_else(|error| panic!("{expression}: {error}"))
    }

    fn try_value(&mut self, expression: &str) -> Result<Value, Value> {
        let question = json!({"expression": expression, "awaitPromise": true, "returnByValue": true});
        let answer = self.try_call("Runtime.evaluate", question)?;
        let wrong = &answer["exceptionDetails"];
        if wrong.is_null() { Ok(answer["result"]["value"].clone()) } else { Err(wrong.clone()) }
    }

    /// Waits until an expression is true; returns how long that took.
    pub fn until(&mut self, expression: &str, limit: Duration) -> Duration {
        let started = Instant::now();
        // Between two pages there is none to evaluate it.
        while self.try_value(expression) != Ok(json!(true)) {
            let waited = started.elapsed();
            if waited >= limit {
                let shown = text(&self.value("document.body.innerText.slice(0, 1500)"));
                panic!("{expression} within {limit:?}; the page says:\n{shown}\n{:?}", self.page_errors);
            }
            pace(Duration::from_millis(50));
        }
        started.elapsed()
    }

    /// Makes the page itself record when an expression is first true, by the system's clock: the test may
    /// be slow.
    pub fn note_when(&mut self, name: &str, expression: &str) {
        self.value(&format!(
            "(() => {{ window.noted ??= {{}}; const look = () => {{ if (!('{name}' in noted) && ({expression})) noted['{name}'] = Date.now(); }}; \
             new MutationObserver(look).observe(document, {{subtree: true, childList: true, characterData: true, attributes: true}}); look(); }})()"
        ));
    }

    /// Time from `since` until the page has recorded it.
    pub fn noted(&mut self, name: &str, since: SystemTime, limit: Duration) -> Duration {
        self.until(&format!("'{name}' in noted"), limit);
        let noted = self.value(&format!("noted['{name}']")).as_f64().unwrap();
        let noted = SystemTime::UNIX_EPOCH + Duration::from_secs_f64(noted / 1000.0);
        noted.duration_since(since).unwrap_or_default()
    }

    /// Presses and releases a key.
    pub fn press(&mut self, key: &str) {
        let character = if key.chars().count() == 1 {
            key
        } else if key == "Enter" {
            "\r"
        } else {
            ""
        };
        for kind in [if character.is_empty() { "rawKeyDown" } else { "keyDown" }, "keyUp"] {
            let code = match key {
                "Tab" => 9,
                "Enter" => 13,
                "Escape" => 27,
                "ArrowRight" => 39,
                "ArrowDown" => 40,
                _ => 0,
            };
            let mut event = json!({"type": kind, "key": key, "windowsVirtualKeyCode": code});
            if kind == "keyDown" {
                event["text"] = json!(character);
            }
            self.call("Input.dispatchKeyEvent", event);
        }
    }

    /// Saves a screenshot of the viewport or the whole page; the file name selects PNG or `WebP`.
    pub fn picture(&mut self, file: &Path, whole: bool) {
        let webp = file.extension().is_some_and(|extension| extension == "webp");
        let mut how = json!({"format": if webp { "webp" } else { "png" }, "captureBeyondViewport": whole});
        if webp {
            how["quality"] = json!(80);
        }
        if whole {
            let size = self.call("Page.getLayoutMetrics", json!({}))["cssContentSize"].clone();
            let height = size["height"].as_f64().unwrap_or(0.0).min(4000.0);
            how["clip"] = json!({"x": 0, "y": 0, "width": size["width"], "height": height, "scale": 1});
        }
        let picture = text(&self.call("Page.captureScreenshot", how)["data"]);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, BASE64_STANDARD.decode(picture).unwrap()).unwrap();
    }
}

/// A string without its quotes.
pub fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), ToOwned::to_owned)
}

fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(program)).find(|path| path.is_file())
}
