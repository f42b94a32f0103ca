//! The order of changes. Changes are made one at a time. An administrator waits for the change under way, and for at
//! most one other change that is not an administrator's. Each other token and each host has at most one change in the
//! common queue, so a caller with many changes delays only itself.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::OwnedMutexGuard;
use unirdma_fleet::Refusal;

/// Most changes of one token or host that wait.
const MAX_WAITING: usize = 32;

type Line = Arc<tokio::sync::Mutex<()>>;

/// The queues of changes.
#[derive(Default)]
pub(crate) struct Turns {
    /// The changes of each token or host, by its name.
    own: Mutex<HashMap<String, Line>>,
    /// The queue for the first change of each of them.
    common: Line,
    /// The queue for the turn itself.
    turn: Line,
}

/// A turn. Dropping it ends the turn.
pub(crate) struct Turn {
    turns: Arc<Turns>,
    who: Option<String>,
    /// In the order of locking. The last one is unlocked first.
    held: Vec<OwnedMutexGuard<()>>,
}

impl Turns {
    /// Waits for a turn of this caller; `None`: an administrator, or the centre itself.
    pub async fn take(self: &Arc<Self>, who: Option<String>) -> Result<Turn, Refusal> {
        let mut turn = Turn { turns: self.clone(), who: who.clone(), held: Vec::new() };
        if let Some(who) = who {
            let own = {
                let mut lines = self.own.lock().unwrap_or_else(PoisonError::into_inner);
                let own = lines.entry(who).or_default();
                if Arc::strong_count(own) > MAX_WAITING {
                    turn.who = None;
                    let text = format!("{MAX_WAITING} of your changes wait already; wait for their answers");
                    return Err(Refusal::full(text));
                }
                own.clone()
            };
            turn.held.push(own.lock_owned().await);
            turn.held.push(self.common.clone().lock_owned().await);
        }
        turn.held.push(self.turn.clone().lock_owned().await);
        Ok(turn)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        while self.held.pop().is_some() {}
        if let Some(who) = &self.who {
            let mut lines = self.turns.own.lock().unwrap_or_else(PoisonError::into_inner);
            if lines.get(who).is_some_and(|line| Arc::strong_count(line) == 1) {
                lines.remove(who);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn settle() {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn an_administrator_and_others_wait_for_one_change_of_who_has_many() {
        let turns = Arc::new(Turns::default());
        let order = Arc::new(Mutex::new(Vec::new()));
        let first = turns.take(Some("greedy".into())).await.unwrap();
        let mut tasks = Vec::new();
        let callers = (0..MAX_WAITING - 1).map(|_| Some("greedy")).chain([Some("other"), None]);
        for who in callers {
            let (turns, order) = (turns.clone(), order.clone());
            tasks.push(tokio::spawn(async move {
                let turn = turns.take(who.map(str::to_owned)).await.unwrap();
                order.lock().unwrap().push(who.unwrap_or("admin"));
                tokio::task::yield_now().await;
                drop(turn);
            }));
            settle().await;
        }
        assert!(turns.take(Some("greedy".into())).await.is_err(), "too many wait");
        assert!(order.lock().unwrap().is_empty());
        drop(first);
        for task in tasks {
            task.await.unwrap();
        }
        let order = order.lock().unwrap().clone();
        let place = |who| order.iter().position(|o| *o == who).unwrap();
        assert!(place("admin") <= 1 && place("other") <= 3, "{order:?}");
        assert_eq!(order.len(), MAX_WAITING + 1);
        assert!(turns.own.lock().unwrap().is_empty(), "nothing is kept of who waits no more");
    }
}
