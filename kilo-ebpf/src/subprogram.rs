//! Subprograms that the verifier checks once, each by itself, however often they are called: the kernel calls
//! such functions global. The verifier follows all others again from every state of every caller, which would
//! make up most of the cost of a first start. Of a global function's arguments it knows only the types, and
//! of the result nothing; a pointer may be null to it. Each must use all its numbers, and the packet: the
//! compiler passes garbage for unused ones, which the verifier refuses. The linker keeps them under their
//! names, which no other function may have.

use aya_ebpf::bindings::__sk_buff;
use kilo_common::drop_reasons::DropReason;

/// An argument beside the packet: a number, or a reference, which is passed as a pointer.
pub trait Argument: Sized {
    type Passed;

    fn pass(self) -> Self::Passed;

    /// `None`: a null pointer, which only the verifier expects.
    ///
    /// # Safety
    /// `passed` must come from [`Self::pass`], and what it refers to must live while the subprogram runs.
    unsafe fn take(passed: Self::Passed) -> Option<Self>;
}

macro_rules! numbers {
    ($($number:ty),*) => {$(
        impl Argument for $number {
            type Passed = Self;
            #[inline(always)]
            fn pass(self) -> Self {
                self
            }
            #[inline(always)]
            unsafe fn take(passed: Self) -> Option<Self> {
                Some(passed)
            }
        }
    )*};
}
numbers!(u8, u32, u64, usize);

impl<T> Argument for &T {
    type Passed = *const T;
    #[inline(always)]
    fn pass(self) -> *const T {
        self
    }
    #[inline(always)]
    unsafe fn take(passed: *const T) -> Option<Self> {
        // SAFETY: as the caller promises.
        unsafe { passed.as_ref() }
    }
}

impl<T> Argument for &mut T {
    type Passed = *mut T;
    #[inline(always)]
    fn pass(self) -> *mut T {
        self
    }
    #[inline(always)]
    unsafe fn take(passed: *mut T) -> Option<Self> {
        // SAFETY: as the caller promises.
        unsafe { passed.as_mut() }
    }
}

/// What subprograms return.
pub trait Returned {
    /// The result if an argument were missing, which only the verifier expects.
    const REFUSED: Self;
}

/// A verdict.
impl Returned for i32 {
    const REFUSED: Self = DropReason::Malformed.index() as Self;
}

/// The result of a lookup or a check.
impl Returned for u32 {
    const REFUSED: Self = 0;
}

/// The packet as subprograms get it: the kernel knows the type by its name.
pub type Skb = *mut __sk_buff;

/// Makes a subprogram of a function (`= function as name`). Of a generic function, makes several, and a
/// function that calls the one that its parameters choose: `by key => { pattern => name[parameters], ... }`.
macro_rules! subprogram {
    ($(#[$doc:meta])* $vis:vis fn $name:ident $args:tt -> $ret:ty = $inner:ident as $instance:ident) => {
        $crate::subprogram::subprogram! {
            $(#[$doc])* $vis fn $name[] $args -> $ret = $inner;
            by () => { () => $instance[] }
        }
    };
    (
        $(#[$doc:meta])*
        $vis:vis fn $name:ident[$($generics:tt)*] $args:tt -> $ret:ty = $inner:ident;
        by $key:expr => { $($pattern:pat => $instance:ident[$($of:tt)*]),+ $(,)? }
    ) => {
        $crate::subprogram::subprogram! {
            @choose [$(#[$doc])* #[inline(always)] $vis fn $name<$($generics)*>] $args $ret
            [$key] $($pattern => $instance),+; $args
        }
        $($crate::subprogram::subprogram! { @global $instance $args $ret [$inner::<$($of)*>] })+
    };
    (
        @choose [$($head:tt)*] ($($arg:ident: $type:ty),*) $ret:ty
        [$key:expr] $($pattern:pat => $instance:ident),+; $args:tt
    ) => {
        $($head)*(skb: $crate::subprogram::Skb $(, $arg: $type)*) -> $ret {
            match $key {
                $($pattern => $crate::subprogram::subprogram!(@call $instance skb $args),)+
            }
        }
    };
    (@call $instance:ident $skb:ident ($($arg:ident: $type:ty),*)) => {
        // SAFETY: what is referred to lives until it returns.
        unsafe { $instance($skb $(, <$type as $crate::subprogram::Argument>::pass($arg))*) }
    };
    (@global $instance:ident ($($arg:ident: $type:ty),*) $ret:ty [$($inner:tt)*]) => {
        #[unsafe(no_mangle)]
        #[inline(never)]
        unsafe extern "C" fn $instance(
            skb: $crate::subprogram::Skb $(, $arg: <$type as $crate::subprogram::Argument>::Passed)*
        ) -> $ret {
            $(
                // SAFETY: the function that chooses passes it, and waits.
                let passed = unsafe { <$type as $crate::subprogram::Argument>::take($arg) };
                let Some($arg) = passed else { return <$ret as $crate::subprogram::Returned>::REFUSED };
            )*
            $($inner)*(skb $(, $arg)*)
        }
    };
}
pub(crate) use subprogram;
