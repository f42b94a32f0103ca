//! Who watches: each has a place, and each token has a part of the places.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use unirdma_fleet::{Actor, Refusal, WATCHERS};

/// Number of watchers, by token.
#[derive(Default)]
pub(crate) struct Watchers(Mutex<HashMap<String, usize>>);

/// The place of one watcher.
pub(crate) struct Place {
    watchers: Arc<Watchers>,
    who: String,
}

impl Watchers {
    fn by_token(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many watch.
    pub fn count(&self) -> usize {
        self.by_token().values().sum()
    }

    /// Takes a place. Dropping it returns the place.
    pub fn take(self: &Arc<Self>, actor: &Actor) -> Result<Place, Refusal> {
        let mut by_token = self.by_token();
        let (all, own) = (by_token.values().sum::<usize>() + 1, by_token.get(actor.who()).map_or(1, |n| n + 1));
        WATCHERS.room(actor, all, own, WATCHERS.part())?;
        by_token.insert(actor.who().into(), own);
        Ok(Place { watchers: self.clone(), who: actor.who().into() })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut by_token = self.watchers.by_token();
        if let Some(own) = by_token.get_mut(&self.who) {
            *own -= 1;
            if *own == 0 {
                by_token.remove(&self.who);
            }
        }
    }
}
