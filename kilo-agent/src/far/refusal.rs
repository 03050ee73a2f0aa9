//! Why an agent refuses a signal.

use kilo_core::label_values;

label_values! {
    /// Why an agent refuses a signal that its programs have passed on: label `why` of `kilo_signals_refused`.
    Refusal {
        /// It cannot be parsed.
        Malformed => "malformed",
        /// Its sender is not a node of this location.
        Unknown => "unknown",
        /// It did not come from the sender's address.
        Foreign => "foreign",
        /// Its tag is not the sender's.
        Forged => "forged",
        /// It did not come through the tunnel of the gateway that sent it.
        Gateway => "gateway",
        /// It is about another location.
        Location => "location",
        /// It claims nodes of another location.
        Member => "member",
        /// Its term is implausibly far ahead.
        Leap => "leap",
        /// Its sender sends too many.
        Rate => "rate",
        /// It was received before.
        Replayed => "replayed",
    }
}
