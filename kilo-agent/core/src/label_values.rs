//! Values of metric labels.

/// Defines an enum of a label's values, each with its text. `ALL` has them all, so that their counters can be
/// created at 0: Prometheus sees no increase in a counter that appears with 1.
#[macro_export]
macro_rules! label_values {
    ($(#[$doc:meta])* $name:ident { $($(#[$value_doc:meta])* $value:ident => $text:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$value_doc])* $value,)+
        }

        impl $name {
            /// All values.
            pub const ALL: &[Self] = &[$(Self::$value,)+];

            /// The value's text.
            pub const fn label(self) -> &'static str {
                match self {
                    $(Self::$value => $text,)+
                }
            }
        }
    };
}
