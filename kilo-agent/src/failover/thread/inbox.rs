//! Delivers what has been read before the thread waits again.

use kilo_failover::Input;

/// Maximum turns before the thread continues with its other work.
const MOST: usize = 4;

/// The receiver of inputs.
pub trait Turns {
    /// Inputs that have been read but not delivered.
    fn inbox(&mut self) -> &mut Vec<Input>;

    /// Whether a turn is due, even if nothing has been read.
    fn is_due(&self) -> bool;

    /// Reads what has arrived meanwhile.
    fn look(&mut self);

    /// Processes all of these inputs; this may add more, such as a word that it has moved.
    fn turn(&mut self, inputs: Vec<Input>);
}

/// Takes turns until nothing is left to deliver and nothing is due. Inputs that cause each other forever must
/// not keep the thread from the rest of its work, so what is left after some turns stays in the inbox for the
/// next step.
pub fn deliver(turns: &mut impl Turns) {
    for turn in 0..MOST {
        if turns.inbox().is_empty() && !turns.is_due() {
            return;
        }
        if turn > 0 {
            // Everything that has arrived is read before the next decision.
            turns.look();
        }
        let inputs = std::mem::take(turns.inbox());
        turns.turn(inputs);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each input except the last one causes the next.
    #[derive(Default)]
    struct Chain {
        inbox: Vec<Input>,
        left: u64,
        delivered: Vec<u64>,
        looks: usize,
    }

    impl Turns for Chain {
        fn inbox(&mut self) -> &mut Vec<Input> {
            &mut self.inbox
        }

        fn is_due(&self) -> bool {
            false
        }

        fn look(&mut self) {
            self.looks += 1;
        }

        fn turn(&mut self, inputs: Vec<Input>) {
            for input in inputs {
                let Input::Decrypted(number) = input else { continue };
                self.delivered.push(number);
                if number < self.left {
                    self.inbox.push(Input::Decrypted(number + 1));
                }
            }
        }
    }

    #[test]
    fn what_many_turns_leave_is_kept_for_the_next_step() {
        let mut chain = Chain { inbox: vec![Input::Decrypted(1)], left: 6, ..Chain::default() };
        deliver(&mut chain);
        assert_eq!((chain.delivered.len(), chain.inbox.len(), chain.looks), (MOST, 1, MOST - 1));
        deliver(&mut chain);
        assert_eq!((&chain.delivered[..], chain.inbox.len()), (&[1, 2, 3, 4, 5, 6][..], 0));
        deliver(&mut chain);
        assert_eq!(chain.delivered.len(), 6, "nothing is left, and nothing is due");
    }
}
