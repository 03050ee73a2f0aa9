//! What must hold in every run: one table.

use std::fmt;

macro_rules! invariants {
    ($($name:ident $text:literal)+) => {
        /// Something that must hold in every run.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Invariant {
            $(#[doc = $text] $name,)+
        }

        impl Invariant {
            /// Every invariant.
            pub const ALL: &[Self] = &[$(Self::$name),+];

            /// The invariant in words.
            pub const fn text(self) -> &'static str {
                match self { $(Self::$name => $text),+ }
            }
        }
    };
}

invariants! {
    TwoHops "two hops"
    NoLoop "no loop"
    TimeToLive "time to live"
    WordRises "a word only rises"
    NoReplay "no replay counts"
    FarFollows "far leaders follow members' words"
    LatestTerm "one owner, of the latest term"
    Outages "outages within the limit"
    Changes "changes of leader within the limit"
    Served "everybody is served in the end"
    SharedServed "shared prefixes are served in the end"
    Undisturbed "nothing changes without need"
    Unsuspected "nobody is suspected without need"
}

impl fmt::Display for Invariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}
