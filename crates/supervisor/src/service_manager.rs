//! Messages to the service manager that started this process (sd_notify(3)). Without one nothing happens.

use std::time::{Duration, Instant};

use sd_notify::NotifyState;

/// The service manager, as this process sees it.
pub(crate) struct ServiceManager {
    is_there: bool,
    /// Time between signs of life; `None`: it wants none.
    period: Option<Duration>,
    next: Instant,
}

impl ServiceManager {
    /// Finds it in the environment. A virtual layer that a command has started is no service, whatever its environment.
    pub fn find(is_service: bool) -> ServiceManager {
        // Half the time after which it would act.
        let period = sd_notify::watchdog_enabled().filter(|_| is_service).map(|limit| limit / 2);
        ServiceManager { is_there: is_service, period, next: Instant::now() }
    }

    /// The administration socket answers.
    pub fn ready(&self, status: &str) {
        self.tell(&[NotifyState::Ready, NotifyState::Status(status)]);
    }

    pub fn stopping(&self) {
        self.tell(&[NotifyState::Stopping]);
    }

    /// Gives a sign of life if it is time for one; `status` makes the line that administrators see. Returns how long it
    /// is until the next one.
    pub fn keep_alive(&mut self, status: impl FnOnce() -> String) -> Option<Duration> {
        let (period, now) = (self.period?, Instant::now());
        if now >= self.next {
            self.tell(&[NotifyState::Watchdog, NotifyState::Status(&status())]);
            self.next = now + period;
        }
        Some(self.next.saturating_duration_since(now))
    }

    fn tell(&self, state: &[NotifyState<'_>]) {
        if !self.is_there {
            return;
        }
        if let Err(e) = sd_notify::notify(state) {
            tracing::warn!(error = %e, "the service manager cannot be told");
        }
    }
}
