//! Binary relations over the events of one execution, as bit rows.

/// Maximum number of events of a program.
pub const MOST_EVENTS: usize = 128;

/// A relation: row `a` is the set of all `b` with `a -> b`.
#[derive(Clone, PartialEq, Eq)]
pub struct Relation {
    rows: Vec<u128>,
}

impl Relation {
    pub fn empty(events: usize) -> Relation {
        assert!(events <= MOST_EVENTS, "{events} events, at most {MOST_EVENTS} are supported");
        Relation { rows: vec![0; events] }
    }

    pub fn add(&mut self, from: usize, to: usize) {
        self.rows[from] |= 1 << to;
    }

    pub fn has(&self, from: usize, to: usize) -> bool {
        self.rows[from] >> to & 1 == 1
    }

    /// Returns all `b` with `from -> b`.
    pub fn successors(&self, from: usize) -> impl Iterator<Item = usize> {
        let mut rest = self.rows[from];
        std::iter::from_fn(move || {
            let next = rest.trailing_zeros() as usize;
            rest &= rest.wrapping_sub(1);
            (next < MOST_EVENTS).then_some(next)
        })
    }

    pub fn union(&self, other: &Relation) -> Relation {
        Relation { rows: self.rows.iter().zip(&other.rows).map(|(a, b)| a | b).collect() }
    }

    /// Returns the least transitive relation that contains this one.
    pub fn closure(&self) -> Relation {
        let mut rows = self.rows.clone();
        for middle in 0..rows.len() {
            let through = rows[middle];
            for row in &mut rows {
                if *row >> middle & 1 == 1 {
                    *row |= through;
                }
            }
        }
        Relation { rows }
    }

    /// Adds `from -> to` to a transitive relation, which stays transitive.
    pub fn add_closed(&mut self, from: usize, to: usize) {
        let reached = self.rows[to] | 1 << to;
        for event in 0..self.rows.len() {
            if event == from || self.has(event, from) {
                self.rows[event] |= reached;
            }
        }
    }

    /// Returns whether no event precedes itself. For a transitive relation this is acyclicity.
    pub fn irreflexive(&self) -> bool {
        (0..self.rows.len()).all(|event| !self.has(event, event))
    }

    pub fn acyclic(&self) -> bool {
        self.closure().irreflexive()
    }
}

#[test]
fn closure_and_cycles() {
    let mut relation = Relation::empty(5);
    relation.add(3, 1);
    relation.add(1, 4);
    assert!(relation.acyclic());
    let closed = relation.closure();
    assert!(closed.has(3, 4) && !closed.has(4, 3));
    assert_eq!(closed.successors(3).collect::<Vec<_>>(), [1, 4]);

    let mut incremental = closed.clone();
    incremental.add_closed(0, 3);
    relation.add(0, 3);
    assert!(incremental == relation.closure());

    relation.add(4, 0);
    assert!(!relation.acyclic());
}
